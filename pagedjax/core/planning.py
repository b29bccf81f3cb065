"""Planning one step: running sequences first, best rank first, then admissions while slots, tokens and blocks last.

Continuous batching after Orca (OSDI'22), on-demand blocks after PagedAttention (SOSP'23), chunked prefill after
Sarathi-Serve (OSDI'24): decodes take their tokens before any prompt, so a long prompt never stalls them.
"""

from collections import defaultdict

from pagedjax.core.admission import admit
from pagedjax.core.batch import Batch, plan_row
from pagedjax.core.blocks import BlockPool, take
from pagedjax.core.choosing import give_way, is_stuck
from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.effects import CopyBlocks, Effect, RunStep
from pagedjax.core.forking import with_own_tail, writes_shared_tail
from pagedjax.core.leaving import drain
from pagedjax.core.parking import park
from pagedjax.core.phases import Phase
from pagedjax.core.plan import Scatter, StepPlan
from pagedjax.core.policy import (
    excess_blocks,
    given_up,
    num_blocks_coming,
    num_blocks_reserved,
    num_to_compute,
    order_of,
    victim_index,
)
from pagedjax.core.prefix import Filled
from pagedjax.core.resuming import land
from pagedjax.core.state import Sequence, State
from pagedjax.core.tenants import charge, leave
from pagedjax.core.tiers import Tiers
from pagedjax.core.yielding import make_way, yields


def plan_step(state: State) -> tuple[State, tuple[Effect, ...]]:
    """Plan the next step, or nothing if there is nothing to compute.

    While all that run only await a choice and nobody in line can come to run, they give way one by one.
    """
    state, effects = _plan_with_suspects(state)
    while is_stuck(state):
        state, given = give_way(state)
        state, more = _plan_with_suspects(state)
        effects += given + more
    return state, effects


def _plan_with_suspects(state: State) -> tuple[State, tuple[Effect, ...]]:
    """A suspect of a failed step runs alone. If it cannot run yet, the others do, without it."""
    if not state.suspects:
        return _plan(state, None)
    if state.in_flight:
        return state, ()
    tried, effects = _plan(state, state.suspects[0])
    return (tried, effects) if effects else _plan(state, None)


def _plan(state: State, alone: int | None) -> tuple[State, tuple[Effect, ...]]:
    service: defaultdict[str, int] = defaultdict(int)
    batch = Batch([], [], {}, service, [], [], order_of(state, service), alone)
    if not state.suspects:
        state, effects = make_way(state, batch.order)
        batch.effects.extend(effects)
    state, short = _continue_running(state, batch)
    line = state.waiting
    if not short:
        state = admit(state, batch)
    rows = batch.rows
    if not rows:
        # Somebody may have left the line without a row: what it had is being fetched.
        return state._replace(tenants=leave(state.tenants, line.queues, state.waiting.queues)), tuple(batch.effects)
    scatters: tuple[Scatter, ...] = ()
    if state.tiers.landing:
        state, scatters = land(state, rows)
    plan = StepPlan(state.next_plan_id, rows, scatters)
    state = state._replace(
        pending=(*state.pending, Filled(batch.filled)),
        in_flight=(*state.in_flight, plan),
        next_plan_id=state.next_plan_id + 1,
        tenants=leave(charge(state.tenants, batch.booked()), line.queues, state.waiting.queues),
    )
    return state, (*batch.effects, RunStep(plan))


def _continue_running(state: State, batch: Batch) -> tuple[State, bool]:
    """Plan the running sequences' rows. Also says whether any of them was short of blocks."""
    block_size, running, pool, tiers = state.config.block_size, list(state.running), state.pool, state.tiers
    shared_tails = state.shared_tails
    copies: list[tuple[int, int]] = []
    left = _num_left(state, batch, running)
    budget = state.config.max_num_batched_tokens - left.count(1)
    num_reserved = num_blocks_reserved(running, block_size)
    num_lacking = _num_blocks_lacking(running, left, budget, block_size)
    num_copies = sum([s.blocks[-1] in shared_tails for s in running]) if shared_tails else 0
    by_rank = _is_scarce(left, num_lacking + num_copies, pool.num_free - num_reserved, state.config)
    stock: tuple[int, ...] = ()
    if by_rank:
        running.sort(key=batch.order.running)
        left = _num_left(state, batch, running)
        budget = state.config.max_num_batched_tokens - left.count(1)
    elif not shared_tails:
        pool, stock = take(pool, num_lacking)
    short, num_coming = False, None
    for index, num_left in enumerate(left):
        length = num_left if num_left <= 1 else min(num_left, budget)
        if length == 0 or running[index].phase is not Phase.RUNNING:
            continue
        sequence = running[index]
        num_lacking = sequence.num_planned + length - len(sequence.blocks) * block_size
        copies_tail = writes_shared_tail(sequence, pool, shared_tails, block_size) if shared_tails else False
        if num_lacking > 0 and stock:
            num_new = num_blocks_for(num_lacking, block_size)
            sequence, stock = sequence._replace(blocks=sequence.blocks + stock[:num_new]), stock[num_new:]
            num_reserved -= num_new if sequence.stay.reserved else 0
        elif num_lacking > 0 or copies_tail:
            num_new = num_blocks_for(max(num_lacking, 0), block_size) + copies_tail
            num_kept = 0 if sequence.stay.reserved else num_reserved
            while num_new + num_kept > pool.num_free:
                short = True
                if num_coming is None:  # counted once for all rows, until somebody else leaves
                    num_coming = num_blocks_coming(given_up(running), pool)
                victim = None
                if num_new + num_kept > pool.num_free + num_coming:
                    victim = victim_index(running, index, excess_blocks(running, batch.order))
                if victim is None:
                    break
                pool, tiers = _preempt(batch, running, victim, pool, tiers)
                num_coming = None
                if copies_tail and not writes_shared_tail(sequence, pool, shared_tails, block_size):
                    copies_tail, num_new = False, num_new - 1  # the victim was the other one that held it
            if num_new + num_kept > pool.num_free or running[index].phase is not Phase.RUNNING:
                continue
            pool, taken = take(pool, num_new)
            num_reserved -= num_new if sequence.stay.reserved else 0
            if copies_tail:
                pool, sequence, copy = with_own_tail(pool, sequence, taken[0])
                taken, num_coming = taken[1:], None
                copies.append(copy)
            sequence = sequence._replace(blocks=sequence.blocks + taken)
        if num_left > 1:
            budget -= length
        running[index] = plan_row(batch, sequence, length, block_size)
    if by_rank:
        running.sort(key=lambda s: s.rank)
    state, effects = drain(state._replace(running=tuple(running), pool=pool, tiers=tiers))
    batch.effects.extend(effects)
    if copies:
        # Behind the gathers of the victims, whose blocks may be among the targets.
        batch.effects.append(CopyBlocks(tuple(copies)))
    return state, short


def _num_left(state: State, batch: Batch, running: list[Sequence]) -> list[int]:
    """Tokens that each sequence has to compute, none if it is to be left out of this step."""
    left = _no_more_than(state.config.max_num_seqs, [num_to_compute(sequence) for sequence in running])
    if not state.suspects:
        return left
    return [0 if batch.leaves_out(state, s.sequence_id) else num_left for s, num_left in zip(running, left)]


def _is_scarce(left: list[int], num_lacking: int, num_free: int, config: SchedulerConfig) -> bool:
    """Whether it matters which sequence is planned first: they lack more blocks than are free, more than one has a
    prompt to compute, or they are too many. In most steps it does not, and they need not be sorted."""
    num_prompts = len(left) - left.count(0) - left.count(1)
    return num_prompts > 1 or num_lacking > num_free or len(left) > config.max_num_seqs


def _num_blocks_lacking(running: list[Sequence], left: list[int], budget: int, block_size: int) -> int:
    """Blocks that a step in which nothing is scarce needs. (Taken in one go: a table is opened anew for each take.)"""
    lengths = [min(num_left, budget) if num_left > 1 else num_left for num_left in left]
    lacking = [s.num_planned + length - len(s.blocks) * block_size for s, length in zip(running, lengths)]
    return sum([num_blocks_for(num_lacking, block_size) for num_lacking in lacking if num_lacking > 0])


def _no_more_than(num_rows: int, left: list[int]) -> list[int]:
    """The others sit the step out: more sequences run than may, since the configuration has changed."""
    if len(left) - left.count(0) <= num_rows:
        return left
    planned = [index for index, num_left in enumerate(left) if num_left > 0][:num_rows]
    return [num_left if index in planned else 0 for index, num_left in enumerate(left)]


def _preempt(
    batch: Batch, running: list[Sequence], index: int, pool: BlockPool, tiers: Tiers
) -> tuple[BlockPool, Tiers]:
    """The blocks of a victim that is in no plan in flight are free at once. Else the beneficiary sits this step out,
    and gets them when the steps in flight that read them are done."""
    victim = yields(running[index], "memory")
    if victim.num_in_flight == 0:
        pool, tiers, effects = park(pool, tiers, victim, batch.order.config)
        batch.effects.extend(effects)
        victim = victim._replace(blocks=())
    running[index] = victim
    return pool, tiers
