"""The one door: `update(state, event) -> (state, effects)`.

A pure function: no clock, no device, no token ids, no text. Times and hashes come in with events, so a recorded
stream of events replays to equal effects, and every state is a snapshot that can be kept, compared or resumed.
"""

from dataclasses import replace
from typing import assert_never

from immutables import Map

from pagedjax.core import waiting as lines
from pagedjax.core.blocks import BlockPool, make_pool, register
from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.errors import SchedulerError
from pagedjax.core.leaving import drain
from pagedjax.core.plan import Row, RowResult, StepPlan
from pagedjax.core.planning import plan_step
from pagedjax.core.request import FinishReason, Request
from pagedjax.core.state import (
    Aborted,
    Arrived,
    Cause,
    Effect,
    Event,
    Finish,
    Phase,
    Reject,
    Sequence,
    State,
    StepDone,
    StepDue,
    Waiting,
    next_phase,
)


def init(config: SchedulerConfig) -> State:
    """The empty state: nothing waits, nothing runs, every block is free."""
    return State(config, Waiting(), (), make_pool(config.num_blocks), Map(), (), 0, 0)


def update(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The state after `event`, and the effects to carry out, in order.

    Raises SchedulerError for an event that cannot follow this state; the old state still stands.
    """
    if event.now_us < state.now_us:
        raise SchedulerError(f"time runs backwards: {event.now_us} after {state.now_us}")
    if event.now_us > state.now_us:
        state = replace(state, now_us=event.now_us)
    match event:
        case Arrived():
            return _arrived(state, event)
        case Aborted():
            return _aborted(state, event.sequence_id)
        case StepDue():
            if len(state.in_flight) == state.config.max_steps_in_flight:
                return state, ()
            return plan_step(state)
        case StepDone():
            return _step_done(state, event)
        case _:
            assert_never(event)


def _arrived(state: State, event: Arrived) -> tuple[State, tuple[Effect, ...]]:
    request = event.request
    _check_request(state, request)
    refused = refusal(state, request)
    if refused is not None:
        return state, (refused,)
    sequence = Sequence(
        request=request,
        arrival_us=event.now_us,
        phase=next_phase(Phase.NEW, Cause.ARRIVE),
        num_tokens=request.prompt_len,
        num_expected=request.prompt_len,
        num_computed=0,
        num_planned=0,
        num_cached=0,
        num_in_flight=0,
        blocks=(),
        block_hashes=event.block_hashes,
    )
    return replace(state, waiting=lines.enqueue(state.waiting, sequence)), ()


def _check_request(state: State, request: Request) -> None:
    sequence_id = request.sequence_id
    if request.prompt_len < 1 or request.max_tokens < 1:
        raise SchedulerError(f"sequence {sequence_id} has nothing to compute: {request}")
    if sequence_id in state.waiting.places or any(s.sequence_id == sequence_id for s in state.running):
        raise SchedulerError(f"sequence {sequence_id} is here already")


def refusal(state: State, request: Request) -> Reject | None:
    """Why the request can never run or must not be queued, or None."""
    config, total = state.config, request.prompt_len + request.max_tokens
    if total > config.max_model_len:
        return Reject(
            request.sequence_id,
            "context_length_exceeded",
            f"This model's maximum context length is {config.max_model_len} tokens. However, you requested "
            f"{total} tokens ({request.prompt_len} in the prompt, {request.max_tokens} in the completion).",
        )
    num_blocks = num_blocks_for(total - 1, config.block_size)
    if num_blocks > config.num_blocks:
        return Reject(
            request.sequence_id,
            "prompt_exceeds_kv_cache",
            f"The request needs {num_blocks} blocks of {config.block_size} tokens ({request.prompt_len} tokens in the "
            f"prompt, {request.max_tokens} in the completion), the KV cache has {config.num_blocks}.",
        )
    num_waiting, num_tokens = len(state.waiting), state.waiting.num_tokens
    if num_waiting >= config.max_queued_requests or num_tokens + request.prompt_len > config.max_queued_tokens:
        return Reject(
            request.sequence_id, "queue_full", f"The queue is full: {num_waiting} requests, {num_tokens} tokens."
        )
    return None


def _aborted(state: State, sequence_id: int) -> tuple[State, tuple[Effect, ...]]:
    waiter = lines.find(state.waiting, sequence_id)
    if waiter is not None:
        next_phase(waiter.phase, Cause.ABORT)  # nothing is in flight, so it is gone at once
        waiting = lines.remove(state.waiting, waiter)
        return replace(state, waiting=waiting), (Finish(sequence_id, FinishReason.ABORT),)
    running = tuple(_abort(s) if s.sequence_id == sequence_id else s for s in state.running)
    return drain(replace(state, running=running))


def _abort(sequence: Sequence) -> Sequence:
    return sequence._replace(
        phase=next_phase(sequence.phase, Cause.ABORT), finish=sequence.finish or FinishReason.ABORT
    )


def _step_done(state: State, event: StepDone) -> tuple[State, tuple[Effect, ...]]:
    plan = _oldest_plan(state, event)
    outcomes = {row.sequence_id: (row, result) for row, result in zip(plan.rows, event.results, strict=True)}
    running = tuple(
        _accept(s, *outcomes[s.sequence_id]) if s.sequence_id in outcomes else s for s in state.running
    )
    state = replace(state, running=running, in_flight=state.in_flight[1:])
    if state.config.enable_prefix_caching:
        state = _register_blocks(state, plan)
    return drain(state)


def _oldest_plan(state: State, event: StepDone) -> StepPlan:
    plan = state.in_flight[0] if state.in_flight else None
    if plan is None or plan.plan_id != event.plan_id:
        raise SchedulerError(f"plan {event.plan_id} is not the oldest in flight")
    if [row.sequence_id for row in plan.rows] != [result.sequence_id for result in event.results]:
        raise SchedulerError(f"the results of plan {event.plan_id} do not match its rows")
    return plan


def _accept(sequence: Sequence, row: Row, result: RowResult) -> Sequence:
    """Confirm one row. What it gave is discarded if the sequence has ended in the meantime."""
    end = row.start + row.length
    if sequence.phase is Phase.FINISHING or sequence.phase is Phase.ABORTING:
        return sequence._replace(num_computed=end, num_in_flight=sequence.num_in_flight - 1)
    phase, finish = sequence.phase, sequence.finish
    if result.finish is not None:
        phase, finish = next_phase(phase, Cause.FINISH), FinishReason(result.finish)
    _check_result(sequence, row, result)
    hashes = sequence.block_hashes
    # Positional: half the time of _replace, and this runs for every row of every step.
    return Sequence(
        sequence.request,
        sequence.arrival_us,
        phase,
        sequence.num_tokens + result.num_accepted,
        sequence.num_expected,
        end,
        sequence.num_planned,
        sequence.num_cached,
        sequence.num_in_flight - 1,
        sequence.blocks,
        hashes + result.block_hashes if result.block_hashes else hashes,
        finish,
    )


def _check_result(sequence: Sequence, row: Row, result: RowResult) -> None:
    expected = int(row.samples)
    if result.num_accepted != expected and result.finish is None or result.num_accepted > expected:
        raise SchedulerError(f"row {row} cannot accept {result.num_accepted} tokens")
    num_sampled = sequence.num_tokens + result.num_accepted - sequence.request.prompt_len
    if num_sampled >= sequence.request.max_tokens and result.finish is None:
        raise SchedulerError(f"sequence {sequence.sequence_id} has all its tokens and is not finished")


def _register_blocks(state: State, plan: StepPlan) -> State:
    """Enter the blocks that a finished plan has computed into the prefix cache."""
    block_size, pool, pending = state.config.block_size, state.pool, state.pending
    rows = [row for row in plan.rows if row.start // block_size < (row.start + row.length) // block_size]
    if not rows:
        return state
    hashes = {s.sequence_id: s.block_hashes for s in state.running}
    for row in rows:
        names = hashes[row.sequence_id]
        for i in range(row.start // block_size, min((row.start + row.length) // block_size, len(names))):
            pool, pending = _register(pool, pending, row.blocks[i], names[i])
    return replace(state, pool=pool, pending=pending)


def _register(
    pool: BlockPool, pending: Map[bytes, int], block_id: int, name: bytes
) -> tuple[BlockPool, Map[bytes, int]]:
    if pending.get(name) == block_id:
        pending = pending.delete(name)
    return register(pool, block_id, name), pending
