"""Planning one step: running sequences first, best rank first, then admissions while slots, tokens and blocks last.

Continuous batching after Orca (OSDI'22), on-demand blocks after PagedAttention (SOSP'23), chunked prefill after
Sarathi-Serve (OSDI'24): decodes take their tokens before any prompt, so a long prompt never stalls them.
"""

from bisect import insort
from collections import Counter, defaultdict
from dataclasses import replace
from typing import NamedTuple

from immutables import Map

from pagedjax.core import waiting as lines
from pagedjax.core.blocks import BlockPool, give, share, take
from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.leaving import drain
from pagedjax.core.plan import Row, StepPlan
from pagedjax.core.policy import (
    Order,
    come_to_run,
    excess_blocks,
    num_blocks_coming,
    num_blocks_promised,
    num_blocks_reserved,
    num_blocks_to_admit,
    num_to_compute,
    order_of,
    victim_index,
)
from pagedjax.core.prefix import longest_prefix, max_prefix_blocks
from pagedjax.core.state import Cause, Effect, Phase, RunStep, Sequence, State, next_phase
from pagedjax.core.tenants import PROMPT_COST, SAMPLE_COST, charge, leave
from pagedjax.core.yielding import make_way, yields

# Waiting sequences whose prefix is being computed in this very step are passed over; not more than this many.
MAX_PASSED_OVER = 16


class _Batch(NamedTuple):
    """The step being planned: its rows, the named blocks that they fill (name -> block id), and their cost in service
    tokens (tenant -> cost), that of sampled tokens when it is `booked`: `samplers` names a tenant for each."""

    decodes: list[Row]
    chunks: list[Row]
    filled: dict[bytes, int]
    service: defaultdict[str, int]
    samplers: list[str]

    def booked(self) -> defaultdict[str, int]:
        """The step's cost so far. (Counted in one go: adding up row by row takes three times as long.)"""
        for tenant, num_sampled in Counter(self.samplers).items():
            self.service[tenant] += SAMPLE_COST * num_sampled
        self.samplers.clear()
        return self.service


def plan_step(state: State) -> tuple[State, tuple[Effect, ...]]:
    """Plan the next step, or nothing if there is nothing to compute."""
    batch = _Batch([], [], {}, defaultdict(int), [])
    order = order_of(state, batch.service)
    state, left = make_way(state, order)
    state, effects, short = _continue_running(state, batch, order)
    effects = left + effects
    line = state.waiting
    if not short:
        state = _admit(state, batch)
    rows = (*batch.decodes, *batch.chunks)
    if not rows:
        return state, effects
    plan = StepPlan(state.next_plan_id, rows)
    state = replace(
        state,
        pending=(*state.pending, Map(batch.filled)),
        in_flight=(*state.in_flight, plan),
        next_plan_id=state.next_plan_id + 1,
        tenants=leave(charge(state.tenants, batch.booked()), line.queues, state.waiting.queues),
    )
    return state, (*effects, RunStep(plan))


def _continue_running(state: State, batch: _Batch, order: Order) -> tuple[State, tuple[Effect, ...], bool]:
    """Plan the running sequences' rows. Also says whether any of them was short of blocks."""
    block_size, running, pool = state.config.block_size, list(state.running), state.pool
    left = [num_to_compute(sequence) for sequence in running]
    num_reserved = num_blocks_reserved(running, block_size)
    by_rank = _is_scarce(left, pool.num_free - num_reserved, state.config)
    if by_rank:
        running.sort(key=order.running)
        left = _no_more_than(state.config.max_num_seqs, [num_to_compute(sequence) for sequence in running])
    budget = state.config.max_num_batched_tokens - left.count(1)
    short = False
    for index, num_left in enumerate(left):
        length = num_left if num_left <= 1 else min(num_left, budget)
        if length == 0 or running[index].phase is not Phase.RUNNING:
            continue
        sequence = running[index]
        num_lacking = sequence.num_planned + length - len(sequence.blocks) * block_size
        if num_lacking > 0:
            num_new = num_blocks_for(num_lacking, block_size)
            num_kept = 0 if sequence.stay.reserved else num_reserved
            if num_new + num_kept > pool.num_free:
                short = True
                pool = _make_room(running, index, num_new + num_kept, pool, order)
                if num_new + num_kept > pool.num_free or running[index].phase is not Phase.RUNNING:
                    continue
            pool, taken = take(pool, num_new)
            sequence = sequence._replace(blocks=sequence.blocks + taken)
            num_reserved -= num_new if sequence.stay.reserved else 0
        if num_left > 1:
            budget -= length
        running[index] = _plan_row(batch, sequence, length, block_size)
    if by_rank:
        running.sort(key=lambda s: s.rank)
    state, effects = drain(replace(state, running=tuple(running), pool=pool))
    return state, effects, short


def _is_scarce(left: list[int], num_free: int, config: SchedulerConfig) -> bool:
    """Whether it matters which sequence is planned first: their tokens may need more blocks than are free, more than
    one has a prompt to compute, or they are too many. In most steps it does not, and they need not be sorted."""
    num_prompts = len(left) - left.count(0) - left.count(1)
    num_wanted = len(left) + num_blocks_for(sum(left), config.block_size)
    return num_prompts > 1 or num_wanted > num_free or len(left) > config.max_num_seqs


def _no_more_than(num_rows: int, left: list[int]) -> list[int]:
    """The others sit the step out: more sequences run than may, since the configuration has changed."""
    if len(left) - left.count(0) <= num_rows:
        return left
    planned = [index for index, num_left in enumerate(left) if num_left > 0][:num_rows]
    return [num_left if index in planned else 0 for index, num_left in enumerate(left)]


def _make_room(running: list[Sequence], beneficiary: int, num_new: int, pool: BlockPool, order: Order) -> BlockPool:
    """Preempt the lowest ranks until the blocks are there or on their way.

    The blocks of a victim that is in no plan in flight are free at once. Else the beneficiary sits this step out, and
    gets them when the steps in flight that read them are done.
    """
    while pool.num_free + num_blocks_coming(running, pool) < num_new:
        index = victim_index(running, beneficiary, excess_blocks(running, order))
        if index is None:
            break
        victim = yields(running[index], "memory")
        if victim.num_in_flight == 0:
            pool, victim = give(pool, victim.blocks, victim.block_hashes), victim._replace(blocks=())
        running[index] = victim
    return pool


def _plan_row(batch: _Batch, sequence: Sequence, length: int, block_size: int) -> Sequence:
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
        stay,
    ) = sequence
    end = start + length
    samples = end == num_expected
    if samples:
        batch.samplers.append(request.tenant)
    if start < request.prompt_len:
        num_new = min(end, request.prompt_len) - max(start, stay.num_served)
        batch.service[request.tenant] += PROMPT_COST * max(0, num_new)
    row = tuple.__new__(Row, (request.sequence_id, start, length, blocks, samples, True))
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
        stay,
    )
    return tuple.__new__(Sequence, advanced)


def _admit(state: State, batch: _Batch) -> State:
    """Admit waiting sequences in order of rank until a slot, a token or a block is missing.

    One whose next block is being computed by a row of this same step is passed over until the next step, when it can
    read that block: so a burst of prompts with one prefix computes it once.
    """
    config = state.config
    slots = config.max_num_seqs - len(state.running)
    budget = config.max_num_batched_tokens - len(batch.decodes) - sum(row.length for row in batch.chunks)
    if slots <= 0 or budget <= 0 or not state.waiting.places:
        return state
    pool, waiting, running = state.pool, state.waiting, list(state.running)
    order = order_of(state, batch.booked())
    num_promised = num_blocks_promised(running, order)
    num_passed_over = 0
    for sequence in lines.in_rank_order(state.waiting, order.in_line):
        if slots == 0 or budget == 0 or num_passed_over == MAX_PASSED_OVER:
            break
        limit = max_prefix_blocks(sequence.num_tokens, config.block_size)
        names = sequence.block_hashes[:limit]
        prefix = longest_prefix(pool, state.pending, names)
        if len(prefix) < len(names) and names[len(prefix)] in batch.filled:
            num_passed_over += 1
            continue
        remaining = sequence.num_tokens - len(prefix) * config.block_size
        length = min(remaining, budget)
        # One that no step holds whole, since the configuration has changed, goes in chunks all the same.
        if length < remaining <= config.max_num_batched_tokens and not config.enable_chunked_prefill:
            break
        num_idle = sum([block_id in pool.idle_tickets for block_id in prefix])
        num_needed = num_blocks_to_admit(sequence, order) - len(prefix)
        if num_needed > pool.num_free - num_idle - num_promised:
            break
        pool, admitted = _start(pool, come_to_run(sequence, order), prefix, length, config.block_size)
        admitted = _plan_row(batch, admitted, length, config.block_size)
        batch.booked()
        num_promised += num_blocks_promised((admitted,), order)
        insort(running, admitted, key=lambda s: s.rank)
        waiting = lines.remove(waiting, sequence)
        slots, budget = slots - 1, budget - length
    return replace(state, pool=pool, waiting=waiting, running=tuple(running))


def _start(
    pool: BlockPool, sequence: Sequence, prefix: tuple[int, ...], length: int, block_size: int
) -> tuple[BlockPool, Sequence]:
    """Make a waiting sequence a running one, with the blocks of a cached prefix and of its first chunk behind it."""
    num_cached = len(prefix) * block_size
    pool = share(pool, prefix)
    pool, taken = take(pool, num_blocks_for(length, block_size))
    sequence = sequence._replace(
        phase=next_phase(sequence.phase, Cause.ADMIT),
        num_computed=num_cached,
        num_planned=num_cached,
        num_cached=num_cached,
        blocks=prefix + taken,
    )
    return pool, sequence
