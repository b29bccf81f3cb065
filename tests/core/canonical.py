"""The abstraction under which two states of a `Model` are one: what a search of all orders of events tells apart.

Forgotten is what no later decision can depend on:

* which number a sequence, a block, a plan or a transfer has: they are numbered anew, in an order that the state itself
  gives (sequences by arrival, blocks as they are first met, transfers by what they move);
* when something happened, but for what can still matter of it: within its slice or its slice over, where somebody of a
  better grade may come; aged, where sequences age;
* names of blocks that nobody can ask for any more. An idle block with such a name has nothing to keep, so those at the
  head of the queue, which are taken next after the clean ones, are clean;
* what a sequence leaves behind: why it once had to yield; how far it had been served, once it is past that; of one that
  has ended, how it came to that, and all but the blocks that it holds till its last step is done;
* the tenants' counters, where no two tenants can be of one grade; those of tenants that nobody will ask for any more;
  and the last one's to leave the line, while somebody is in line. Otherwise what counts is the order of the counters
  and the distances between neighbours, no further than all that can still be booked could make up for.
"""

import marshal
from hashlib import blake2b
from typing import Any

from pagedjax.core.blocks import BlockPool
from pagedjax.core.effects import CopyBlocks, Discard, Effect, Fetch, Finish, Preempt, RunStep, SwapOut
from pagedjax.core.phases import Phase
from pagedjax.core.plan import Scatter, StepPlan, Tier
from pagedjax.core.policy import STAYS
from pagedjax.core.state import Sequence
from pagedjax.core.table import PAGE_SIZE, Table
from pagedjax.core.tenants import PROMPT_COST, SAMPLE_COST, SCALE, Tenant
from pagedjax.core.tiers import Copy, pool_of
from pagedjax.core.waiting import in_rank_order
from tests.core.model import SLICE_US, Model
from tests.core.naming import GONE, Naming

PHASES = {phase: number for number, phase in enumerate(Phase)}
PHASES[Phase.ABORTING] = PHASES[Phase.FINISHING]
TIERS = {Tier.HOST: 0, Tier.DISK: 1}


def digest(model: Model) -> bytes:
    """Equal for two states if and only if (but for collisions of 128 bits) they are one state."""
    return blake2b(marshal.dumps(canonical(Naming(model)), 2), digest_size=16).digest()


def canonical(naming: Naming) -> tuple[Any, ...]:
    """All that is told apart. All blocks have their numbers then, but the clean ones, which are all alike."""
    model = naming.model
    state = model.state
    tiers, waiting = state.tiers, state.waiting
    return (
        tuple([_sequence(naming, s) for s in state.running]),
        tuple([_sequence(naming, s) for s in in_rank_order(waiting)]),
        tuple([naming.sequence(i) for i, (_, ticket) in sorted(waiting.places.items()) if ticket is None]),
        tuple([_plan(naming, plan) for plan in state.in_flight]),
        _pool(naming, state.pool, Tier.DEVICE),
        tuple([(naming.sequence(i), *_parked(naming, p)) for i, p in sorted(tiers.parked.items())]),
        tuple([_transfer(naming, tiers.transfers[i]) for i in naming.transfers]),
        tuple([naming.sequence(i) for i in tiers.landing]),
        tuple([_pool(naming, pool_of(tiers, tier), tier) for tier in TIERS]),
        tuple([tuple(sorted([(naming.name(n), naming.block(b)) for n, b in p.items()])) for p in state.pending]),
        tuple(sorted([naming.block(block_id) for block_id in state.shared_tails])),
        tuple([naming.sequence(i) for i in state.suspects]),
        _tenants(naming),
        model.to_come,
        model.num_failures,
        min(model.num_aborts, len(naming.sequences.keys() - model.ended) + len(model.to_come)),
        model.num_forks,
        model.num_runs,
    )


def renamed_effects(naming: Naming, effects: tuple[Effect, ...]) -> list[Any]:
    """Effects in the words of the state that they come from. Clean blocks are numbered as they are taken."""
    return [_effect(naming, effect) for effect in effects]


def _sequence(naming: Naming, s: Sequence) -> tuple[Any, ...]:
    place, table = naming.sequence(s.sequence_id), naming.table(s.blocks)
    kind, parent = naming.model.kinds[s.sequence_id], naming.sequence(s.request.fork_of)
    path = naming.model.paths.get(s.sequence_id, ())
    known = kind, place, parent, path, PHASES[s.phase], len(s.block_hashes), s.num_in_flight, table
    if s.phase is Phase.FINISHING or s.phase is Phase.ABORTING:
        return known
    stay, is_past = s.stay, s.num_computed >= s.stay.num_served < s.num_planned
    return (
        *known,
        s.num_tokens,
        s.num_expected,
        s.num_computed,
        s.num_planned,
        s.num_cached if naming.model.state.config.min_execution_chunk else 0,
        0 if is_past else stay.num_served,
        stay.reserved,
        stay.reason if s.phase is Phase.YIELDING else "",
        *_times(naming, s),
    )


def _times(naming: Naming, s: Sequence) -> tuple[int, ...]:
    """How long it has been in line, and whether its slice is over, as far as that matters, in slices."""
    model, stay = naming.model, s.stay
    instance, elapsed, waited = model.instance, (model.now_us - stay.since_us) // SLICE_US, stay.waited_us // SLICE_US
    most = instance.slices_to_age or int(model.state.config.preemption_mode == "conservative")
    if s.phase not in STAYS and s.phase is not Phase.YIELDING:
        return (min(waited + elapsed, most),)
    is_top = s.request.priority <= naming.stakes.best and not instance.slices_to_age and instance.min_sample >= 1_000
    return min(waited, most), min(elapsed, 1) if s.phase in STAYS and not is_top else 0


def _plan(naming: Naming, plan: StepPlan) -> tuple[Any, ...]:
    rows = tuple(
        [
            (naming.sequence(sequence_id), start, length, naming.table(blocks), samples, writes)
            for sequence_id, start, length, blocks, samples, writes in plan.rows
        ]
    )
    return rows, tuple([_scatter(naming, scatter) for scatter in plan.scatters])


def _scatter(naming: Naming, scatter: Scatter) -> tuple[Any, ...]:
    return naming.transfer(scatter.transfer_id), tuple([(n, naming.block(b)) for n, b in scatter.pairs])


def _pool(naming: Naming, pool: BlockPool, tier: Tier) -> tuple[Any, ...]:
    """Blocks that are held and idle, and names; and how many blocks are clean."""
    if not pool.num_blocks:
        return ()
    counts = tuple(sorted([(naming.block(b, tier), count) for b, count in _entries(pool.counts)]))
    idle, num_clean = [], len(pool.clean)
    for _, (block_id, name) in _entries(pool.idle):
        number = naming.name(name)
        if idle or number != GONE:
            idle.append((naming.block(block_id, tier), number))
        else:
            num_clean += 1
    cached = [(naming.name(name), block_id) for name, block_id in pool.cached.items()]
    known = sorted([(number, naming.block(block_id, tier)) for number, block_id in cached if number != GONE])
    return counts, tuple(idle), tuple(known), num_clean


def _entries(table: Table[Any]) -> list[tuple[int, Any]]:
    """In order of their keys."""
    pages = sorted(table.pages.items())
    return [(PAGE_SIZE * number + i, v) for number, page in pages for i, v in enumerate(page) if v is not None]


def _parked(naming: Naming, parked: Any) -> tuple[Any, ...]:
    return (
        naming.names(parked.names),
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
        naming.names(transfer.names),
        tuple([naming.sequence(i) for i in transfer.sequence_ids]),
        transfer.is_fetch,
    )


def _tenants(naming: Naming) -> tuple[Any, ...]:
    model, (_, _, live, counters_decide) = naming.model, naming.stakes
    tenants, known = model.state.tenants, tuple(sorted(model.state.tenants.accounts))
    accounts = [(name, tenants.accounts.get(name, Tenant())) for name in sorted(live)]
    shares: tuple[Any, ...] = ()
    if model.instance.min_sample < 1_000:
        shares = tuple([(t.service - t.since.own, tenants.total - t.since.total) for _, t in accounts])
    if not counters_decide:
        return known, shares
    counters = [tenant.counter for _, tenant in accounts]
    if not model.state.waiting.places:
        counters.append(tenants.last_counter)
    most, height, heights = SCALE * _num_to_book(model) + 1, 0, {}
    for lower, upper in zip([min(counters), *sorted(counters)], sorted(counters)):
        height += min(upper - lower, most)
        heights[upper] = height
    return known, shares, tuple([heights[counter] for counter in counters])


def _num_to_book(model: Model) -> int:
    """Service tokens that can still be booked, or given back: no event takes a distance further than it lowers this.

    A sampled token counts twice while it is to come, and once in flight, since it may have been sampled in vain; what
    was in flight when a step fails is booked once more.
    """
    state, asked = model.state, model.asked
    config, sequences = state.config, [*state.running, *in_rank_order(state.waiting)]
    num = sum(SAMPLE_COST for plan in state.in_flight for row in plan.rows if row.samples)
    in_a_plan = PROMPT_COST * config.max_num_batched_tokens + 2 * SAMPLE_COST * config.max_num_seqs
    num += model.num_failures[0] * config.max_steps_in_flight * in_a_plan
    for kind in model.to_come:
        num += PROMPT_COST * len(asked[kind].prompt) + 2 * SAMPLE_COST * asked[kind].max_tokens
    num += model.num_forks * 2 * SAMPLE_COST * max([one.max_tokens for one in asked if one.is_beam], default=0)
    for s in sequences:
        if s.finish is None:
            num += PROMPT_COST * max(0, s.request.prompt_len - max(s.stay.num_served, s.num_planned))
            num += 2 * SAMPLE_COST * (s.request.max_tokens - (s.num_expected - s.request.prompt_len))
    return num


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
        case Finish(sequence_id, _):
            return "finish", naming.sequence(sequence_id)
        case _:
            return "reject", effect.code
