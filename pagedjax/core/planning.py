"""Planning one step: running sequences first, best rank first, then admissions while slots, tokens and blocks last.

Continuous batching after Orca (OSDI'22), on-demand blocks after PagedAttention (SOSP'23), chunked prefill after
Sarathi-Serve (OSDI'24): decodes take their tokens before any prompt, so a long prompt never stalls them.
"""

from bisect import insort
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from immutables import Map

from pagedjax.core import waiting as lines
from pagedjax.core.blocks import BlockPool, share, take
from pagedjax.core.config import num_blocks_for
from pagedjax.core.forking import awaits_parent, parent_of, start_of_fork, with_own_tail, writes_shared_tail
from pagedjax.core.leaving import drain
from pagedjax.core.parking import park, unpark
from pagedjax.core.plan import Row, Scatter, StepPlan
from pagedjax.core.policy import (
    Order,
    num_blocks_coming,
    num_blocks_promised,
    num_blocks_to_admit,
    num_to_compute,
    victim_index,
)
from pagedjax.core.resuming import Start, land, start_fetch, start_of
from pagedjax.core.state import Cause, CopyBlocks, Effect, Phase, RunStep, Sequence, State, next_phase
from pagedjax.core.tenants import PROMPT_COST, SAMPLE_COST, charge, leave
from pagedjax.core.tiers import Tiers

# Waiting sequences whose prefix is on its way (it is being computed in this very step, say) are passed over; not more
# than this many.
MAX_PASSED_OVER = 16


class _Batch(NamedTuple):
    """The step being planned: its rows, the named blocks that they fill (name -> block id), their cost in service
    tokens (tenant -> cost), and the effects that come before it.

    `alone` is the one sequence that may run in it, if that is to be tried alone.
    """

    decodes: list[Row]
    chunks: list[Row]
    filled: dict[bytes, int]
    service: defaultdict[str, int]
    effects: list[Effect]
    alone: int | None

    def leaves_out(self, state: State, sequence_id: int) -> bool:
        return sequence_id in state.suspects if self.alone is None else sequence_id != self.alone


def plan_step(state: State) -> tuple[State, tuple[Effect, ...]]:
    """Plan the next step, or nothing if there is nothing to compute.

    A suspect of a failed step runs alone. If it cannot run yet, the others do, without it.
    """
    if not state.suspects:
        return _plan(state, None)
    if state.in_flight:
        return state, ()
    tried, effects = _plan(state, state.suspects[0])
    return (tried, effects) if effects else _plan(state, None)


def _plan(state: State, alone: int | None) -> tuple[State, tuple[Effect, ...]]:
    batch = _Batch([], [], {}, defaultdict(int), [], alone)
    state, short = _continue_running(state, batch)
    line = state.waiting
    if not short:
        state = _admit(state, batch)
    rows = (*batch.decodes, *batch.chunks)
    if not rows:
        # Somebody may have left the line without a row: what it had is being fetched.
        return replace(state, tenants=leave(state.tenants, line.queues, state.waiting.queues)), tuple(batch.effects)
    scatters: tuple[Scatter, ...] = ()
    if state.tiers.landing:
        state, scatters = land(state, rows)
    plan = StepPlan(state.next_plan_id, rows, scatters)
    state = replace(
        state,
        pending=(*state.pending, Map(batch.filled)),
        in_flight=(*state.in_flight, plan),
        next_plan_id=state.next_plan_id + 1,
        tenants=leave(charge(state.tenants, batch.service), line.queues, state.waiting.queues),
    )
    return state, (*batch.effects, RunStep(plan))


def _continue_running(state: State, batch: _Batch) -> tuple[State, bool]:
    """Plan the running sequences' rows. Also says whether any of them was short of blocks."""
    block_size, running, pool, tiers = state.config.block_size, list(state.running), state.pool, state.tiers
    shared_tails, copies = state.shared_tails, []
    left = [num_to_compute(sequence) for sequence in running]
    by_turn = len(state.tenants.accounts) > 1 and _is_scarce(left, pool.num_free, block_size)
    if by_turn:
        running.sort(key=Order(state.tenants, {}).rank)
        left = [num_to_compute(sequence) for sequence in running]
    if state.suspects:
        left = [0 if batch.leaves_out(state, s.sequence_id) else num_left for s, num_left in zip(running, left)]
    budget = state.config.max_num_batched_tokens - left.count(1)
    short = False
    for index, num_left in enumerate(left):
        length = num_left if num_left <= 1 else min(num_left, budget)
        if length == 0 or running[index].phase is not Phase.RUNNING:
            continue
        sequence = running[index]
        num_lacking = sequence.num_planned + length - len(sequence.blocks) * block_size
        copies_tail = bool(shared_tails) and writes_shared_tail(sequence, pool, shared_tails, block_size)
        if num_lacking > 0 or copies_tail:
            num_new = num_blocks_for(max(num_lacking, 0), block_size) + copies_tail
            if num_new > pool.num_free:
                short = True
                pool, tiers = _make_room(state, batch, running, index, num_new, pool, tiers)
                if num_new > pool.num_free or running[index].phase is not Phase.RUNNING:
                    continue
            pool, taken = take(pool, num_new)
            if copies_tail:
                pool, sequence, copy = with_own_tail(pool, sequence, taken[0])
                taken = taken[1:]
                copies.append(copy)
            sequence = sequence._replace(blocks=sequence.blocks + taken)
        if num_left > 1:
            budget -= length
        running[index] = _plan_row(batch, sequence, length, block_size)
    if by_turn:
        running.sort(key=lambda s: s.rank)
    state, effects = drain(replace(state, running=tuple(running), pool=pool, tiers=tiers))
    batch.effects.extend(effects)
    if copies:
        # Behind the gathers of the victims, whose blocks may be among the targets.
        batch.effects.append(CopyBlocks(tuple(copies)))
    return state, short


def _is_scarce(left: list[int], num_free: int, block_size: int) -> bool:
    """Whether it matters which of several tenants' sequences is planned first: their tokens may need more blocks than
    are free, or more than one has a prompt to compute. In most steps it does not, and they need not be sorted."""
    num_prompts = len(left) - left.count(0) - left.count(1)
    return num_prompts > 1 or len(left) + num_blocks_for(sum(left), block_size) > num_free


def _make_room(
    state: State,
    batch: _Batch,
    running: list[Sequence],
    beneficiary: int,
    num_new: int,
    pool: BlockPool,
    tiers: Tiers,
) -> tuple[BlockPool, Tiers]:
    """Preempt the lowest ranks until the blocks are there or on their way.

    The blocks of a victim that is in no plan in flight are free at once. Else the beneficiary sits this step out, and
    gets them when the steps in flight that read them are done.
    """
    while pool.num_free + num_blocks_coming(running, pool) < num_new:
        index = victim_index(running, beneficiary)
        if index is None:
            break
        victim = running[index]
        victim = victim._replace(phase=next_phase(victim.phase, Cause.PREEMPT))
        if victim.num_in_flight == 0:
            pool, tiers, effects = park(pool, tiers, victim, state.config)
            batch.effects.extend(effects)
            victim = victim._replace(blocks=())
        running[index] = victim
    return pool, tiers


def _plan_row(batch: _Batch, sequence: Sequence, length: int, block_size: int, writes: bool = True) -> Sequence:
    """Add the next `length` tokens of a sequence, which has the blocks for them, to the batch."""
    # Unpacked, and made by tuple.__new__: a quarter of the time of _replace, and this runs for every row of every step.
    (
        request,
        arrival_us,
        phase,
        num_tokens,
        num_expected,
        num_computed,
        start,
        num_cached,
        num_in_flight,
        blocks,
        names,
        finish,
        num_served,
    ) = sequence
    end = start + length
    samples = end == num_expected
    if samples:
        batch.service[request.tenant] += SAMPLE_COST
    if start < request.prompt_len:
        batch.service[request.tenant] += PROMPT_COST * max(0, min(end, request.prompt_len) - max(start, num_served))
    row = tuple.__new__(Row, (request.sequence_id, start, length, blocks, samples, writes))
    (batch.decodes if length == 1 else batch.chunks).append(row)
    if end % block_size < length:
        filled = slice(start // block_size, end // block_size)
        batch.filled.update(zip(names[filled], blocks[filled]))
    advanced = (
        request,
        arrival_us,
        phase,
        num_tokens,
        num_expected + samples,
        num_computed,
        end,
        num_cached,
        num_in_flight + 1,
        blocks,
        names,
        finish,
        num_served,
    )
    return tuple.__new__(Sequence, advanced)


def _admit(state: State, batch: _Batch) -> State:
    """Admit waiting sequences in order of rank until a slot, a token or a block is missing.

    One whose next block is being computed by a row of this same step is passed over until the next step, when it can
    read that block: so a burst of prompts with one prefix computes it once. So is one whose copies are still on their
    way to a lower tier, but its slot and its blocks are kept for it.
    """
    config = state.config
    slots = config.max_num_seqs - len(state.running)
    budget = config.max_num_batched_tokens - len(batch.decodes) - sum(row.length for row in batch.chunks)
    if slots <= 0 or budget <= 0 or not state.waiting.places:
        return state
    pool, tiers, waiting, running = state.pool, state.tiers, state.waiting, list(state.running)
    shared_tails = state.shared_tails
    num_promised = num_blocks_promised(running, config.block_size)
    num_passed_over = 0
    for sequence in lines.in_rank_order(state.waiting, Order(state.tenants, batch.service).rank):
        if slots <= 0 or budget == 0 or num_passed_over == MAX_PASSED_OVER:
            break
        if state.suspects and batch.leaves_out(state, sequence.sequence_id):
            continue
        parked = tiers.parked.get(sequence.sequence_id)
        start = start_of(pool, state.pending, sequence, parked, config.block_size)
        if sequence.request.fork_of is not None and parked is None:
            parent = parent_of(sequence, running)
            if awaits_parent(state, sequence, parent, (*batch.decodes, *batch.chunks)):
                num_passed_over += 1
                continue
            start = start_of_fork(parent, config.block_size) if parent else start
        if start.next_name in batch.filled:
            num_passed_over += 1
            continue
        remaining = sequence.num_tokens - start.num_there
        length = min(remaining, budget)
        if length < remaining and not config.enable_chunked_prefill:
            break
        num_idle = sum([block_id in pool.idle_tickets for block_id in start.blocks])
        num_needed = num_blocks_to_admit(sequence, config.block_size) - len(start.blocks)
        if num_needed > pool.num_free - num_idle - num_promised:
            break
        if start.num_fetched and sequence.phase is Phase.SWAPPING_OUT:
            num_passed_over, slots, num_promised = num_passed_over + 1, slots - 1, num_promised + num_needed + num_idle
            continue
        if start.num_fetched:
            pool, tiers, admitted, fetches = start_fetch(pool, tiers, sequence, start, config.block_size)
            batch.effects.extend(fetches)
        else:
            pool, admitted = _start(pool, sequence, start, length, config.block_size)
            pool, tiers = unpark(pool, tiers, admitted, config.block_size)
            shared_tails |= start.shared_tail
            admitted = _plan_row(batch, admitted, length, config.block_size, start.writes)
            budget -= length
        num_promised += max(0, num_blocks_for(sequence.num_tokens, config.block_size) - len(admitted.blocks))
        insort(running, admitted, key=lambda s: s.rank)
        waiting = lines.remove(waiting, sequence)
        slots -= 1
    return replace(state, pool=pool, tiers=tiers, waiting=waiting, running=tuple(running), shared_tails=shared_tails)


def _start(
    pool: BlockPool, sequence: Sequence, start: Start, length: int, block_size: int
) -> tuple[BlockPool, Sequence]:
    """Make a waiting sequence a running one, with the blocks that are there and those of its first chunk."""
    pool = share(pool, start.blocks)
    pool, taken = take(pool, num_blocks_for(start.num_there + length, block_size) - len(start.blocks))
    sequence = sequence._replace(
        phase=next_phase(sequence.phase, Cause.ADMIT),
        num_computed=start.num_there if start.writes else sequence.num_tokens,
        num_planned=start.num_there,
        num_cached=start.num_there,
        blocks=start.blocks + taken,
    )
    return pool, sequence
