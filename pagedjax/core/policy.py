"""Who goes first, who must give way, and how much room a sequence needs: the rules that planning applies."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from itertools import chain
from typing import NamedTuple

from pagedjax.core.blocks import BlockPool
from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.phases import Phase
from pagedjax.core.request import MIN_PRIORITY
from pagedjax.core.state import Sequence, State
from pagedjax.core.tenants import Tenants, account, counter, expected_output, is_owed, weight_in_use

# (not protected, not aged, priority): who is of a better grade, the smaller one, may preempt.
Grade = tuple[bool, bool, int]
# A grade, the tenant's virtual counter, arrival, id: who goes first.
Rank = tuple[bool, bool, int, int, int, int]
# Those have a slot and blocks, and are not on their way out.
STAYS = (Phase.RUNNING, Phase.FETCHING)


class Order(NamedTuple):
    """Who goes first while one step is planned. The smallest rank does: see `Rank`. (NamedTuple: one is made each step,
    at a third of a frozen dataclass's cost.)

    `planned` is the service that the step has given each tenant so far; it grows while the step is planned. What is
    found out about a tenant is kept for the rest of the step: whether it is `protected`, the output that is `expected`
    of it. `total_weight` is that of the tenants in use.
    """

    config: SchedulerConfig
    tenants: Tenants
    now_us: int
    max_wait_us: int
    planned: Mapping[str, int]
    total_weight: int
    protected: dict[str, bool]
    expected: dict[str, int]

    def in_line(self, sequence: Sequence) -> Rank:
        """The rank of a sequence that waits."""
        return (*self.grade_in_line(sequence), *self._turn(sequence))

    def running(self, sequence: Sequence) -> Rank:
        """The rank of a sequence that runs."""
        return (*self.grade(sequence), *self._turn(sequence))

    def grade_in_line(self, sequence: Sequence) -> Grade:
        return self._grade(sequence, waited_us(sequence, self.now_us))

    def grade(self, sequence: Sequence) -> Grade:
        """Of one that runs. It stays aged for as long as it lives."""
        return self._grade(sequence, sequence.stay.waited_us)

    def protects(self, tenant: str) -> bool:
        """Whether the tenant has so little of its fair share that nothing more may be taken from it."""
        known = self.protected.get(tenant)
        if known is None:
            config = self.config
            known = config.preemption_strategy == "tenant_aware" and len(self.tenants.accounts) > 1
            known = known and is_owed(self.tenants, tenant, self.total_weight, config.fairness_threshold)
            self.protected[tenant] = known
        return known

    def expected_output(self, tenant: str) -> int:
        if tenant not in self.expected:
            self.expected[tenant] = expected_output(self.tenants, tenant)
        return self.expected[tenant]

    def _grade(self, sequence: Sequence, waited_us: int) -> Grade:
        # The priority of one that is aged counts no more: else those of high priority, aged too, would stay before it.
        aged = waited_us >= self.max_wait_us
        request = sequence.request
        return not self.protects(request.tenant), not aged, MIN_PRIORITY if aged else request.priority

    def _turn(self, sequence: Sequence) -> tuple[int, int, int]:
        request = sequence.request
        due = counter(self.tenants, request.tenant, self.planned.get(request.tenant, 0))
        return due, sequence.arrival_us, request.sequence_id


def order_of(state: State, planned: Mapping[str, int]) -> Order:
    config, tenants = state.config, state.tenants
    total_weight = weight_in_use(tenants, state.waiting.queues)
    return Order(config, tenants, state.now_us, config.max_wait_us, planned, total_weight, {}, {})


def waited_us(sequence: Sequence, now_us: int) -> int:
    """How long a waiting sequence has been in line, all its times together."""
    return sequence.stay.waited_us + now_us - sequence.stay.since_us


def come_to_run(sequence: Sequence, order: Order) -> Sequence:
    """The sequence as it leaves the line: it has waited so long, and has had nothing yet."""
    stay = sequence.stay._replace(
        since_us=order.now_us,
        waited_us=waited_us(sequence, order.now_us),
        reserved=is_reserved(sequence, order.config),
    )
    return sequence._replace(stay=stay)


def num_to_compute(sequence: Sequence) -> int:
    """Tokens of a running sequence that no plan covers yet. One that has sampled its last token only awaits it."""
    # Unpacked: half the time of attributes, and this runs for every sequence of every step.
    request, _, phase, num_tokens, num_expected, _, num_planned, _, _, _, _, _, _ = sequence
    if phase is not Phase.RUNNING or num_expected - request.prompt_len >= request.max_tokens:
        return 0
    if request.needs_confirmation and num_expected > num_tokens:
        return 0
    return num_expected - num_planned


def victim_index(running: Rows[Sequence], beneficiary: int, excess: Mapping[str, int]) -> int | None:
    """Who gives up its blocks for `running[beneficiary]` (best rank first in `running`), and never the top.

    The lowest rank of a tenant that holds too much, or else the lowest rank; the beneficiary itself if nobody ranks
    below it.
    """
    below = range(len(running) - 1, max(beneficiary, 1) - 1, -1)
    candidates = [i for i in below if running[i].phase in STAYS and not running[i].stay.reserved]
    greedy = [i for i in candidates if running[i].request.tenant in excess] if excess else []
    return next(iter(greedy or candidates), None)


def excess_blocks(running: Rows[Sequence], order: Order) -> dict[str, int]:
    """The tenants that hold more than (1 + fairness_threshold) x their fair share of the blocks, and how many more."""
    config = order.config
    if config.preemption_strategy != "tenant_aware" or len(order.tenants.accounts) < 2:
        return {}
    held: Counter[str] = Counter()
    for sequence in running:
        if sequence.phase is Phase.RUNNING:
            held[sequence.request.tenant] += len(sequence.blocks)
    fair = {t: account(order.tenants, t).weight / order.total_weight for t in held}
    most = {t: (1 + config.fairness_threshold) * part for t, part in fair.items()}
    return {t: num - int(most[t] * config.num_blocks) for t, num in held.items() if num > most[t] * config.num_blocks}


def given_up(running: Rows[Sequence]) -> Counter[int]:
    """How many references to each block sequences on their way out hold."""
    return Counter(chain.from_iterable(s.blocks for s in running if s.phase not in STAYS))


def num_blocks_coming(given: Mapping[int, int], pool: BlockPool) -> int:
    """Blocks that sequences on their way out will free when the steps in flight are done: see `given_up`."""
    return sum([pool.counts[block_id] == count for block_id, count in given.items()])


def is_reserved(sequence: Sequence, config: SchedulerConfig) -> bool:
    """Whether room for all that a sequence may need is to be kept from its admission on, so that it is never
    preempted. Not of beams: what their forks will need is not known, and each must be able to give way to the others.
    """
    request = sequence.request
    return not (request.needs_confirmation or (config.enable_preemption and request.preemptible))


def num_blocks_to_admit(sequence: Sequence, order: Order) -> int:
    """Blocks that must be there before a sequence is (re)admitted, never more than it can use.

    Its whole context and one block of headroom, or a chunk if it comes back, so that it is not preempted again at its
    next token; if conservative, as many as it is likely to need; if it is not to be preempted, all.
    """
    config, most = order.config, max(sequence.max_len, sequence.num_tokens)
    if is_reserved(sequence, config):
        return num_blocks_for(most, config.block_size)
    num_tokens = sequence.num_tokens + max(config.block_size, num_tokens_ahead(sequence, config))
    if config.preemption_mode == "conservative":
        num_tokens = max(num_tokens, _expected_len(sequence, order))
    return num_blocks_for(min(num_tokens, most), config.block_size)


def num_tokens_ahead(sequence: Sequence, config: SchedulerConfig) -> int:
    """What one that was preempted must be able to compute once it is back: a chunk, or its rest."""
    if not sequence.stay.num_served:
        return 0
    return min(config.min_execution_chunk, max(0, sequence.max_len - sequence.num_tokens))


def num_blocks_growing(sequence: Sequence, running: Rows[Sequence], order: Order) -> int:
    """Blocks that those who run may take while a preempted sequence that comes back computes its chunk.

    They must be there beside its own: what comes back ranks low, so the next shortage would be at its expense. While a
    swapped one is fetched they go on, as long again, it is assumed.
    """
    num_ahead = num_tokens_ahead(sequence, order.config) * (1 if sequence.phase is Phase.WAITING else 2)
    return num_blocks_promised(running, order, num_ahead) - num_blocks_promised(running, order) if num_ahead else 0


def num_blocks_promised(running: Rows[Sequence], order: Order, num_ahead: int = 0) -> int:
    """Blocks that running sequences still lack and that nobody may be admitted to: those of a prompt whose later chunks
    have not been planned yet, those of the expected length if conservative, those reserved, and those for `num_ahead`
    tokens more."""
    config = order.config
    if not num_ahead and config.preemption_mode == "aggressive":  # to those who only decode, nothing
        running = [
            s for s in running if s.num_expected - s.num_planned > 1 or s.phase is Phase.FETCHING or s.stay.reserved
        ]
    num_promised = 0
    for sequence in running:
        if sequence.phase in STAYS:
            num_tokens = 0
            if sequence.stay.reserved:
                num_tokens = sequence.max_len
            elif config.preemption_mode == "conservative":
                num_tokens = max(sequence.num_expected, min(_expected_len(sequence, order), sequence.max_len))
            elif sequence.num_expected - sequence.num_planned > 1 or sequence.phase is Phase.FETCHING:
                num_tokens = sequence.num_expected
            if num_ahead:
                num_tokens = max(num_tokens, min(sequence.num_expected + num_ahead, sequence.max_len))
            num_lacking = num_tokens - len(sequence.blocks) * config.block_size
            if num_lacking > 0:
                num_promised += num_blocks_for(num_lacking, config.block_size)
    return num_promised


def num_blocks_reserved(running: Rows[Sequence], block_size: int) -> int:
    """Blocks that are free but kept for sequences which must not be preempted."""
    reserved = [s for s in running if s.stay.reserved and s.phase in STAYS]
    return sum(num_blocks_for(s.max_len, block_size) - len(s.blocks) for s in reserved) if reserved else 0


def _expected_len(sequence: Sequence, order: Order) -> int:
    request = sequence.request
    return request.prompt_len + min(request.max_tokens, order.expected_output(request.tenant)) - 1
