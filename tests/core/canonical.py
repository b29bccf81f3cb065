"""The abstraction under which two states of a `Model` are one: what a search of all orders of events tells apart.

Forgotten is what no later decision can depend on: which number a sequence, a block, a plan or a transfer has (they are
numbered anew, in an order that the state itself gives); when something happened, but for what can still matter of it
(within its slice, its slice over, aged); what clean blocks hold; names of blocks that nobody can ask for any more; and
of the tenants' counters everything but their distances, which count no further than what is still to be computed can
make up for.
"""

import marshal
from hashlib import blake2b
from typing import Any

from pagedjax.core.blocks import BlockPool
from pagedjax.core.plan import Scatter, StepPlan, Tier
from pagedjax.core.state import CopyBlocks, Discard, Effect, Fetch, Finish, Phase, Preempt, RunStep, Sequence, SwapOut
from pagedjax.core.tenants import SAMPLE_COST, SCALE
from pagedjax.core.tiers import Copy, pool_of
from pagedjax.core.waiting import in_rank_order
from tests.core.model import SLICE_US, Model, names_of_stream

PHASES = {phase: number for number, phase in enumerate(Phase)}
TIERS = {Tier.HOST: 0, Tier.DISK: 1}
GONE = -1


class Naming:
    """New numbers for what a model's state names. Blocks get theirs as they are first met."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.sequences = {sequence_id: place for place, sequence_id in enumerate(model.here())}
        self.transfers = {transfer_id: place for place, transfer_id in enumerate(sorted(model.state.tiers.transfers))}
        self.blocks: dict[Any, dict[int, int]] = {Tier.DEVICE: {}, Tier.HOST: {}, Tier.DISK: {}}
        self.wanted = _wanted_names(model)

    def number_blocks(self) -> None:
        """Number all blocks but the clean ones, which are all alike."""
        canonical(self)

    def block(self, block_id: int, tier: Tier = Tier.DEVICE) -> int:
        known = self.blocks[tier]
        return known.setdefault(block_id, len(known))

    def table(self, block_ids: tuple[int, ...], tier: Tier = Tier.DEVICE) -> tuple[int, ...]:
        return tuple([self.block(block_id, tier) for block_id in block_ids])

    def sequence(self, sequence_id: int | None) -> int:
        return GONE if sequence_id is None else self.sequences.get(sequence_id, GONE)

    def transfer(self, transfer_id: int) -> int:
        """One that has ended already has nothing that tells it from others."""
        return self.transfers.get(transfer_id, GONE)

    def name(self, name: bytes) -> Any:
        if len(name) < 32:
            sequence_id, _, place = name.partition(b":")
            return self.sequence(int(sequence_id)), place
        return self.wanted.get(name, GONE)


def digest(model: Model) -> bytes:
    """Equal for two states if and only if (but for collisions of 128 bits) they are one state."""
    return blake2b(marshal.dumps(canonical(Naming(model)), 2), digest_size=16).digest()


def canonical(naming: Naming) -> tuple[Any, ...]:
    model = naming.model
    state = model.state
    running = tuple([_sequence(naming, s) for s in state.running])
    waiting = tuple([_sequence(naming, s) for s in in_rank_order(state.waiting)])
    in_line = tuple([naming.sequence(i) for i, (_, ticket) in sorted(state.waiting.places.items()) if ticket is None])
    return (
        running,
        waiting,
        in_line,
        tuple([_plan(naming, plan) for plan in state.in_flight]),
        _pool(naming, state.pool, Tier.DEVICE),
        tuple([(naming.sequence(i), _parked(naming, p)) for i, p in sorted(state.tiers.parked.items())]),
        tuple([_transfer(naming, transfer) for _, transfer in sorted(state.tiers.transfers.items())]),
        tuple([naming.sequence(i) for i in state.tiers.landing]),
        tuple([_pool(naming, pool_of(state.tiers, tier), tier) for tier in TIERS]),
        tuple([tuple(sorted([(_key(naming, n), naming.block(b)) for n, b in p.items()])) for p in state.pending]),
        tuple(sorted([naming.block(block_id) for block_id in state.shared_tails])),
        tuple([naming.sequence(i) for i in state.suspects]),
        _tenants(model),
        model.to_come,
        model.num_failures,
        min(model.num_aborts, len(model.asked)),
    )


def renamed_effects(naming: Naming, effects: tuple[Effect, ...]) -> list[Any]:
    """Effects in the words of the state that they come from. Clean blocks are numbered as they are taken."""
    return [_effect(naming, effect) for effect in effects]


def _wanted_names(model: Model) -> dict[bytes, tuple[int, int]]:
    """The names that somebody can ask for, or has, from now on."""
    size = model.state.config.block_size
    wanted: dict[bytes, tuple[int, int]] = {}
    kinds = [(model.kinds[i], i if model.requests[i].fork_of is not None else 0) for i in model.here()]
    for kind, salt in [*kinds, *((kind, 0) for kind in model.to_come)]:
        asked = model.asked[kind]
        for index, name in enumerate(names_of_stream(asked.prompt, asked.max_tokens, salt, size)):
            wanted.setdefault(name, (len(wanted), index))
    return wanted


def _sequence(naming: Naming, s: Sequence) -> tuple[Any, ...]:
    model, stay = naming.model, s.stay
    elapsed = (model.now_us - stay.since_us) // SLICE_US
    waited = stay.waited_us // SLICE_US
    waits = s.sequence_id in model.state.waiting.places
    most = model.instance.slices_to_age or int(model.state.config.preemption_mode == "conservative")
    return (
        model.kinds[s.sequence_id],
        naming.sequence(s.sequence_id),
        naming.sequence(s.request.fork_of),
        PHASES[s.phase],
        s.num_tokens,
        s.num_expected,
        s.num_computed,
        s.num_planned,
        s.num_cached,
        s.num_in_flight,
        naming.table(s.blocks),
        len(s.block_hashes),
        str(s.finish),
        min(waited + elapsed, most) if waits else (min(waited, most), min(elapsed, 1)),
        stay.num_served,
        stay.reserved,
        "" if waits else stay.reason,
    )


def _plan(naming: Naming, plan: StepPlan) -> tuple[Any, ...]:
    rows = tuple(
        [
            (naming.sequence(r.sequence_id), r.start, r.length, naming.table(r.blocks), r.samples, r.writes)
            for r in plan.rows
        ]
    )
    return rows, tuple([_scatter(naming, scatter) for scatter in plan.scatters])


def _scatter(naming: Naming, scatter: Scatter) -> tuple[Any, ...]:
    return naming.transfer(scatter.transfer_id), tuple([(n, naming.block(b)) for n, b in scatter.pairs])


def _key(naming: Naming, name: bytes) -> bytes:
    return repr(naming.name(name)).encode()


def _pool(naming: Naming, pool: BlockPool, tier: Tier) -> tuple[Any, ...]:
    idle = tuple([(naming.block(b, tier), _key(naming, n)) for _, (b, n) in sorted(pool.idle.items())])
    counts = tuple(sorted([(naming.block(b, tier), count) for b, count in sorted(pool.counts.items())]))
    cached = tuple(sorted([(_key(naming, name), naming.block(b, tier)) for name, b in pool.cached.items()]))
    return idle, counts, cached, len(pool.clean)


def _parked(naming: Naming, parked: Any) -> tuple[Any, ...]:
    return (
        tuple([_key(naming, name) for name in parked.names]),
        parked.num_computed,
        tuple([_copy(naming, copy) for copy in parked.copies]),
        tuple([naming.transfer(i) for i in parked.awaited]),
        tuple([_scatter(naming, scatter) for scatter in parked.scatters]),
    )


def _copy(naming: Naming, copy: Copy) -> tuple[int, int]:
    return TIERS[copy.tier], naming.block(copy.block_id, copy.tier)


def _transfer(naming: Naming, transfer: Any) -> tuple[Any, ...]:
    return (
        TIERS[transfer.tier],
        naming.table(transfer.block_ids, transfer.tier),
        tuple([_key(naming, name) for name in transfer.names]),
        tuple([naming.sequence(i) for i in transfer.sequence_ids]),
        transfer.is_fetch,
    )


def _tenants(model: Model) -> tuple[Any, ...]:
    tenants, judged = model.state.tenants, model.instance.min_sample < 1_000
    accounts = sorted(tenants.accounts.items())
    counters = [*(tenant.counter for _, tenant in accounts), tenants.last_counter]
    least, most = min(counters), _most_to_come(model)
    shares = [(t.service - t.since.own, tenants.total - t.since.total) for _, t in accounts] if judged else []
    return tuple([name for name, _ in accounts]), tuple([min(c - least, most) for c in counters]), tuple(shares)


def _most_to_come(model: Model) -> int:
    """No counter can grow by more than this. A step that fails, and a refund, may count what it cost once more."""
    kinds = [*(model.kinds[i] for i in model.here()), *model.to_come]
    num_tokens = sum(len(model.asked[kind].prompt) + SAMPLE_COST * (model.asked[kind].max_tokens + 1) for kind in kinds)
    return SCALE * (num_tokens + SAMPLE_COST * 2 * model.num_failures[0] * len(kinds)) + 1


def _effect(naming: Naming, effect: Effect) -> tuple[Any, ...]:
    match effect:
        case RunStep(plan):
            return "run", _plan(naming, plan)
        case CopyBlocks(pairs):
            return "copy", tuple([(naming.block(a), naming.block(b)) for a, b in pairs])
        case SwapOut(_, tier, moves):
            return "swap out", tier, tuple([(naming.block(a), naming.block(b, tier)) for a, b in moves])
        case Fetch(_, tier, block_ids):
            return "fetch", tier, naming.table(block_ids, tier)
        case Discard(transfer_id):
            return "discard", naming.transfer(transfer_id)
        case Preempt(sequence_id, num_lost_tokens, method, reason):
            return "preempt", naming.sequence(sequence_id), num_lost_tokens, method, reason
        case Finish(sequence_id, reason):
            return "finish", naming.sequence(sequence_id), reason
        case _:
            return "reject", effect.code
