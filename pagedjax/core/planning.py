"""Planning one step: running sequences first, best rank first, then admissions while slots, tokens and blocks last.

Continuous batching after Orca (OSDI'22), on-demand blocks after PagedAttention (SOSP'23), chunked prefill after
Sarathi-Serve (OSDI'24): decodes take their tokens before any prompt, so a long prompt never stalls them.
"""

from bisect import insort
from dataclasses import replace

from immutables import Map

from pagedjax.core import waiting as lines
from pagedjax.core.blocks import BlockPool, give, share, take
from pagedjax.core.config import num_blocks_for
from pagedjax.core.leaving import drain
from pagedjax.core.plan import Row, StepPlan
from pagedjax.core.policy import can_run, num_blocks_coming, num_blocks_promised, num_blocks_to_admit, victim_index
from pagedjax.core.prefix import longest_prefix, max_prefix_blocks
from pagedjax.core.state import Cause, Effect, Phase, RunStep, Sequence, State, next_phase

# Waiting sequences whose prefix is being computed in this very step are passed over; not more than this many.
MAX_PASSED_OVER = 16


def plan_step(state: State) -> tuple[State, tuple[Effect, ...]]:
    """Plan the next step, or nothing if there is nothing to compute."""
    state, rows, effects, short = _continue_running(state)
    if not short:
        state, admitted = _admit(state, rows)
        rows += admitted
    if not rows:
        return state, tuple(effects)
    rows.sort(key=_is_chunk)
    plan = StepPlan(state.next_plan_id, tuple(rows))
    state = replace(
        state,
        pending=_with_fresh(state, rows),
        in_flight=(*state.in_flight, plan),
        next_plan_id=state.next_plan_id + 1,
    )
    return state, (*effects, RunStep(plan))


def _continue_running(state: State) -> tuple[State, list[Row], list[Effect], bool]:
    """Rows of the running sequences. Also says whether any of them was short of blocks."""
    block_size = state.config.block_size
    running, pool = list(state.running), state.pool
    num_decodes = sum(can_run(s) and s.num_expected - s.num_planned == 1 for s in running)
    budget = state.config.max_num_batched_tokens - num_decodes
    rows: list[Row] = []
    short = False
    for index in range(len(running)):
        sequence = running[index]
        remaining = sequence.num_expected - sequence.num_planned
        if remaining == 0 or not can_run(sequence):
            continue
        length = 1 if remaining == 1 else min(remaining, budget)
        if length == 0:
            continue
        num_new = num_blocks_for(sequence.num_planned + length, block_size) - len(sequence.blocks)
        if num_new > pool.num_free:
            short = True
            pool = _make_room(running, index, num_new, pool)
            if num_new > pool.num_free or running[index].phase is not Phase.RUNNING:
                continue
        if remaining > 1:
            budget -= length
        if num_new:
            pool, taken = take(pool, num_new)
            sequence = sequence._replace(blocks=sequence.blocks + taken)
        running[index], row = _advance(sequence, length)
        rows.append(row)
    state, effects = drain(replace(state, running=tuple(running), pool=pool))
    return state, rows, list(effects), short


def _make_room(running: list[Sequence], beneficiary: int, num_new: int, pool: BlockPool) -> BlockPool:
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
            pool, victim = give(pool, victim.blocks), victim._replace(blocks=())
        running[index] = victim
    return pool


def _advance(sequence: Sequence, length: int) -> tuple[Sequence, Row]:
    """Plan the next `length` tokens of a sequence that has the blocks for them."""
    start, end = sequence.num_planned, sequence.num_planned + length
    samples = end == sequence.num_expected
    row = Row(sequence.sequence_id, start, length, sequence.blocks, samples)
    # Positional: half the time of _replace, and this runs for every row of every step.
    advanced = Sequence(
        sequence.request,
        sequence.arrival_us,
        sequence.phase,
        sequence.num_tokens,
        sequence.num_expected + samples,
        sequence.num_computed,
        end,
        sequence.num_cached,
        sequence.num_in_flight + 1,
        sequence.blocks,
        sequence.block_hashes,
        sequence.finish,
    )
    return advanced, row


def _admit(state: State, rows: list[Row]) -> tuple[State, list[Row]]:
    """Admit waiting sequences in rank order until a slot, a token or a block is missing.

    One whose next block is being computed by a row of this same step is passed over until the next step, when it can
    read that block: so a burst of prompts with one prefix computes it once.
    """
    config = state.config
    slots = config.max_num_seqs - len(state.running)
    budget = config.max_num_batched_tokens - sum(row.length for row in rows)
    if slots <= 0 or budget <= 0 or not state.waiting.places:
        return state, []
    pool, waiting, running = state.pool, state.waiting, list(state.running)
    num_promised = num_blocks_promised(running, config.block_size)
    fresh = set(_fresh_blocks(state, running, rows))
    admitted: list[Row] = []
    num_passed_over = 0
    for sequence in lines.in_rank_order(state.waiting):
        if slots == 0 or budget == 0 or num_passed_over == MAX_PASSED_OVER:
            break
        prefix = _prefix(state, pool, sequence)
        if _next_hash(sequence, len(prefix), config.block_size) in fresh:
            num_passed_over += 1
            continue
        remaining = sequence.num_tokens - len(prefix) * config.block_size
        length = min(remaining, budget)
        if length < remaining and not config.enable_chunked_prefill:
            break
        num_idle = sum(block_id not in pool.counts for block_id in prefix)
        num_needed = num_blocks_to_admit(sequence, config.block_size) - len(prefix)
        if num_needed > pool.num_free - num_idle - num_promised:
            break
        pool, sequence_now, row = _start(pool, sequence, prefix, length, config.block_size)
        waiting = lines.remove(waiting, sequence)
        insort(running, sequence_now, key=lambda s: s.rank)
        admitted.append(row)
        fresh.update(_fresh_blocks(state, (sequence_now,), (row,)))
        num_promised += num_blocks_for(sequence.num_tokens, config.block_size) - len(sequence_now.blocks)
        slots, budget = slots - 1, budget - length
    return replace(state, pool=pool, waiting=waiting, running=tuple(running)), admitted


def _prefix(state: State, pool: BlockPool, sequence: Sequence) -> tuple[int, ...]:
    if not state.config.enable_prefix_caching:
        return ()
    limit = max_prefix_blocks(sequence.num_tokens, state.config.block_size)
    return longest_prefix(pool, state.pending, sequence.block_hashes, limit)


def _next_hash(sequence: Sequence, num_blocks: int, block_size: int) -> bytes | None:
    """The name of the first block that the prefix cache lacks, if the sequence could have taken it from there."""
    if num_blocks < min(max_prefix_blocks(sequence.num_tokens, block_size), len(sequence.block_hashes)):
        return sequence.block_hashes[num_blocks]
    return None


def _start(
    pool: BlockPool, sequence: Sequence, prefix: tuple[int, ...], length: int, block_size: int
) -> tuple[BlockPool, Sequence, Row]:
    """Move a waiting sequence to running with its first chunk behind a cached prefix."""
    num_cached = len(prefix) * block_size
    pool = share(pool, prefix)
    pool, taken = take(pool, num_blocks_for(num_cached + length, block_size) - len(prefix))
    sequence = sequence._replace(
        phase=next_phase(sequence.phase, Cause.ADMIT),
        num_computed=num_cached,
        num_planned=num_cached,
        num_cached=num_cached,
        blocks=prefix + taken,
    )
    return pool, *_advance(sequence, length)


def _fresh_blocks(
    state: State, sequences: list[Sequence] | tuple[Sequence, ...], rows: list[Row] | tuple[Row, ...]
) -> dict[bytes, int]:
    """The named blocks that these rows complete, hash -> block id."""
    if not state.config.enable_prefix_caching:
        return {}
    block_size = state.config.block_size
    hashes = {s.sequence_id: s.block_hashes for s in sequences}
    fresh: dict[bytes, int] = {}
    for row in rows:
        first, last = row.start // block_size, (row.start + row.length) // block_size
        if first < last:
            names = hashes[row.sequence_id]
            fresh |= {names[i]: row.blocks[i] for i in range(first, min(last, len(names)))}
    return fresh


def _with_fresh(state: State, rows: list[Row]) -> Map[bytes, int]:
    """`pending` with the blocks that the new plan computes; a block that is already there keeps its entry."""
    pending = state.pending.mutate()
    for name, block_id in _fresh_blocks(state, state.running, rows).items():
        if name not in state.pool.cached and name not in pending:
            pending[name] = block_id
    return pending.finish()


def _is_chunk(row: Row) -> bool:
    return row.length > 1
