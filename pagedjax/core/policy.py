"""Who goes first, who must give way, and how much room a sequence needs: the rules that planning applies."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from itertools import chain
from typing import NamedTuple

from pagedjax.core.blocks import BlockPool
from pagedjax.core.config import num_blocks_for
from pagedjax.core.state import Phase, Sequence
from pagedjax.core.tenants import Tenants, counter

Rank = tuple[int, int, int, int]


class Order(NamedTuple):
    """Who goes first while one step is planned. `planned` is the service that the step has given each tenant so far."""

    tenants: Tenants
    planned: Mapping[str, int]

    def rank(self, sequence: Sequence) -> Rank:
        """The smallest goes first: priority, the tenant's virtual counter, arrival, id."""
        request = sequence.request
        due = counter(self.tenants, request.tenant, self.planned.get(request.tenant, 0))
        return request.priority, due, sequence.arrival_us, request.sequence_id


STAYS = (Phase.RUNNING, Phase.FETCHING)


def num_to_compute(sequence: Sequence) -> int:
    """Tokens of a running sequence that no plan covers yet. One that has sampled its last token only awaits it."""
    request, num_expected = sequence.request, sequence.num_expected
    if sequence.phase is not Phase.RUNNING or num_expected - request.prompt_len >= request.max_tokens:
        return 0
    if request.needs_confirmation and num_expected > sequence.num_tokens:
        return 0
    return num_expected - sequence.num_planned


def victim_index(running: Rows[Sequence], beneficiary: int) -> int | None:
    """Who gives up its blocks for `running[beneficiary]` (best rank first in `running`): the lowest rank that still
    runs (or is about to), the beneficiary itself if nobody ranks below it, and never the top."""
    for index in range(len(running) - 1, max(beneficiary, 1) - 1, -1):
        if running[index].phase in STAYS:
            return index
    return None


def num_blocks_coming(running: Rows[Sequence], pool: BlockPool) -> int:
    """Blocks that sequences on their way out will free when the steps in flight are done."""
    given = Counter(chain.from_iterable(s.blocks for s in running if s.phase not in STAYS))
    return sum(pool.counts[block_id] == count for block_id, count in given.items())


def num_blocks_to_admit(sequence: Sequence, block_size: int) -> int:
    """Blocks that must be there before a sequence is (re)admitted: its whole context and one block of headroom, so
    that it is not preempted again at its next token; never more than it can use."""
    return num_blocks_for(min(sequence.num_tokens + block_size, max(sequence.max_len, sequence.num_tokens)), block_size)


def num_blocks_promised(running: Rows[Sequence], block_size: int) -> int:
    """Blocks that admitted prompts still lack because their later chunks have not been planned yet."""
    return sum(
        max(0, num_blocks_for(s.num_expected, block_size) - len(s.blocks))
        for s in running
        if (s.phase is Phase.RUNNING and s.num_expected - s.num_planned > 1) or s.phase is Phase.FETCHING
    )
