"""Admission: who in line comes to run in the step being planned, and with what it starts."""

from bisect import insort

from pagedjax.core import waiting as lines
from pagedjax.core.batch import Batch, plan_row
from pagedjax.core.blocks import BlockPool, share, take
from pagedjax.core.config import num_blocks_for
from pagedjax.core.forking import awaits_parent, parent_of, start_of_fork
from pagedjax.core.parking import unpark
from pagedjax.core.phases import Cause, Phase, next_phase
from pagedjax.core.policy import (
    Grade,
    come_to_run,
    is_reserved,
    num_blocks_growing,
    num_blocks_promised,
    num_blocks_to_admit,
    order_of,
)
from pagedjax.core.resuming import Start, start_fetch, start_of
from pagedjax.core.state import Sequence, State
from pagedjax.core.tiers import Tiers

# Waiting sequences whose prefix is on its way (it is being computed in this very step, say) are passed over; not more
# than this many.
MAX_PASSED_OVER = 16


def admit(state: State, batch: Batch) -> State:
    """Admit waiting sequences in order of rank until a slot, a token or a block is missing.

    One whose next block is being computed by a row of this same step is passed over until the next step, when it can
    read that block: so a burst of prompts with one prefix computes it once. Nobody of a worse grade comes before it, or
    whoever has just made way for it would be back at once. One whose copies are still on their way to a lower tier is
    passed over too, but its slot and its blocks are kept for it.
    """
    config = state.config
    slots = config.max_num_seqs - len(state.running)
    budget = config.max_num_batched_tokens - len(batch.decodes) - sum(row.length for row in batch.chunks)
    if slots <= 0 or budget <= 0 or not state.waiting.places:
        return state
    pool, tiers, waiting, running = state.pool, state.tiers, state.waiting, list(state.running)
    order = order_of(state, batch.booked())
    shared_tails = state.shared_tails
    num_promised = num_blocks_promised(running, order)
    num_passed_over = 0
    held_up: Grade | None = None
    for sequence in lines.in_rank_order(state.waiting, order.in_line):
        if slots <= 0 or budget == 0 or num_passed_over == MAX_PASSED_OVER:
            break
        if sequence.awaits_choice or (state.suspects and batch.leaves_out(state, sequence.sequence_id)):
            continue
        if held_up is not None and order.grade_in_line(sequence) > held_up:
            break
        start = _start_of(state, batch, sequence, pool, tiers, running)
        if start is None:
            num_passed_over += 1
            held_up = held_up or order.grade_in_line(sequence)
            continue
        remaining = sequence.num_tokens - start.num_there
        length = min(remaining, budget)
        # One that no step holds whole, since the configuration has changed, goes in chunks all the same.
        if length < remaining <= config.max_num_batched_tokens and not config.enable_chunked_prefill:
            break
        num_idle = sum([block_id in pool.idle_tickets for block_id in start.blocks])
        num_needed = num_blocks_to_admit(sequence, order) - len(start.blocks)
        num_growing = num_blocks_growing(sequence, running, order)
        if num_needed + num_growing > pool.num_free - num_idle - num_promised:
            break
        if start.num_fetched and sequence.phase is Phase.SWAPPING_OUT:
            num_passed_over, slots, num_promised = num_passed_over + 1, slots - 1, num_promised + num_needed + num_idle
            continue
        admitted = come_to_run(sequence, order)
        if start.num_fetched:
            pool, tiers, admitted, fetches = start_fetch(pool, tiers, admitted, start, config.block_size)
            batch.effects.extend(fetches)
        else:
            pool, admitted = _come_to_run(pool, admitted, start, length, config.block_size)
            pool, tiers = unpark(pool, tiers, admitted, config.block_size)
            shared_tails |= start.shared_tail
            admitted = plan_row(batch, admitted, length, config.block_size, start.writes)
            batch.booked()
            budget -= length
        num_promised += num_blocks_promised((admitted,), order)
        insort(running, admitted, key=lambda s: s.rank)
        waiting = lines.remove(waiting, sequence)
        slots -= 1
    return state._replace(pool=pool, tiers=tiers, waiting=waiting, running=tuple(running), shared_tails=shared_tails)


def _start_of(
    state: State, batch: Batch, sequence: Sequence, pool: BlockPool, tiers: Tiers, running: list[Sequence]
) -> Start | None:
    """Where a waiting sequence can start, or None if it is better off in the next step."""
    parked = tiers.parked.get(sequence.sequence_id)
    if sequence.request.fork_of is not None and parked is None:
        parent = parent_of(sequence, running)
        if awaits_parent(state, sequence, parent, batch.rows):
            return None
        if parent is not None:
            return start_of_fork(parent, state.config.block_size, is_reserved(sequence, state.config))
    start = start_of(pool, state.pending, sequence, parked, state.config.block_size)
    return None if start.next_name in batch.filled else start


def _come_to_run(
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
