"""The one door: `update(state, event) -> (state, effects)`.

A pure function: no clock, no device, no token ids, no text. Times and hashes come in with events, so a recorded
stream of events replays to equal effects, and every state is a snapshot that can be kept, compared or resumed.
"""

from collections import Counter
from dataclasses import replace
from operator import itemgetter
from typing import assert_never

from pagedjax.core import waiting as lines
from pagedjax.core.blocks import make_pool, register
from pagedjax.core.choosing import choose
from pagedjax.core.config import FIXED, SchedulerConfig, num_blocks_for
from pagedjax.core.errors import ConfigError, SchedulerError
from pagedjax.core.failing import step_failed, without_cleared
from pagedjax.core.forking import add_children, leave_for_slots
from pagedjax.core.leaving import drain, end
from pagedjax.core.plan import Row, RowResult, StepPlan
from pagedjax.core.planning import plan_step
from pagedjax.core.request import FinishReason, Request
from pagedjax.core.state import (
    Aborted,
    Arrived,
    Cause,
    ConfigChanged,
    Effect,
    Event,
    Phase,
    Queue,
    Reject,
    Sequence,
    State,
    Stay,
    StepDone,
    StepDue,
    StepFailed,
    TenantChanged,
    TransferDone,
    Waiting,
    next_phase,
)
from pagedjax.core.tenants import SAMPLE_COST, Tenants, charge, enter, leave, reweighted
from pagedjax.core.tiers import make_tiers
from pagedjax.core.transfers import transfer_done


def init(config: SchedulerConfig) -> State:
    """The empty state: nothing waits, nothing runs, every block is free."""
    tiers = make_tiers(config.num_host_blocks, config.num_disk_blocks)
    return State(config, Waiting(), (), make_pool(config.num_blocks), (), (), 0, 0, tiers)


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
            if len(state.in_flight) >= state.config.max_steps_in_flight:
                return state, ()
            return plan_step(state)
        case StepDone():
            return _step_done(state, event)
        case StepFailed():
            return step_failed(state, event)
        case TransferDone():
            return transfer_done(state, event)
        case ConfigChanged():
            return _config_changed(state, event.config), ()
        case TenantChanged():
            return _config_changed(state, replace(state.config, tenant_weights=event.weights)), ()
        case _:
            assert_never(event)


def _config_changed(state: State, config: SchedulerConfig) -> State:
    for name in FIXED:
        if getattr(config, name) != getattr(state.config, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{name} cannot change while the engine runs; set {flag} and start it anew")
    tenants = state.tenants
    if config.tenant_weights != state.config.tenant_weights:
        tenants = reweighted(tenants, config.tenant_weights)
    return replace(state, config=config, tenants=tenants, config_since=state.next_plan_id)


def _arrived(state: State, event: Arrived) -> tuple[State, tuple[Effect, ...]]:
    request, config = event.request, state.config
    _check_request(state, request)
    if len(event.block_hashes) not in (0, request.prompt_len // config.block_size):
        raise SchedulerError(f"sequence {request.sequence_id} has {len(event.block_hashes)} block names: {request}")
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
        block_hashes=event.block_hashes if config.enable_prefix_caching else (),
        stay=Stay(since_us=event.now_us, named=config.enable_prefix_caching),
    )
    tenants = enter(state.tenants, request.tenant, state.waiting.queues, config.tenant_weights)
    return replace(state, waiting=lines.enqueue(state.waiting, sequence), tenants=tenants), ()


def _check_request(state: State, request: Request) -> None:
    sequence_id = request.sequence_id
    if request.prompt_len < 1 or request.max_tokens < 1:
        raise SchedulerError(f"sequence {sequence_id} has nothing to compute: {request}")
    if sequence_id in state.waiting.places or any(s.request.sequence_id == sequence_id for s in state.running):
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
    return _queue_refusal(state, request)


def refused_param(state: State, request: Request) -> str:
    """The field to blame for a refusal: what the request asks for beyond its prompt, if that alone would be taken."""
    return "prompt" if refusal(state, request._replace(max_tokens=1)) else "max_tokens"


def _queue_refusal(state: State, request: Request) -> Reject | None:
    """Why the request must not be queued: the line, or its tenant's share of it, has no room."""
    config, waiting = state.config, state.waiting
    max_requests, max_tokens = config.queue_share(request.tenant)
    if request.prompt_len > max_tokens:
        message = f"The prompt has {request.prompt_len} tokens, and at most {max_tokens} may wait."
        return Reject(request.sequence_id, "prompt_exceeds_queue", message)
    if len(waiting) >= config.max_queued_requests or waiting.num_tokens + request.prompt_len > config.max_queued_tokens:
        message = f"The queue is full: {len(waiting)} requests, {waiting.num_tokens} tokens."
        return Reject(request.sequence_id, "queue_full", message)
    num_requests, num_tokens = waiting.queues.get(request.tenant, Queue())
    if num_requests >= max_requests or num_tokens + request.prompt_len > max_tokens:
        message = f"The queue of tenant {request.tenant} is full: {num_requests} requests, {num_tokens} tokens."
        return Reject(request.sequence_id, "queue_full", message)
    return None


def _aborted(state: State, sequence_id: int) -> tuple[State, tuple[Effect, ...]]:
    waiter = lines.find(state.waiting, sequence_id)
    if waiter is not None:
        # It is in no step in flight, so it is gone at once.
        waiting = lines.remove(state.waiting, waiter)
        tenants = leave(state.tenants, state.waiting.queues, waiting.queues)
        state = replace(state, waiting=waiting, tenants=tenants)
        return end(state, waiter._replace(finish=FinishReason.ABORT))
    index = next((i for i, s in enumerate(state.running) if s.request.sequence_id == sequence_id), None)
    if index is None:
        return state, ()
    running = (*state.running[:index], _abort(state.running[index]), *state.running[index + 1 :])
    return drain(replace(state, running=running))


def _abort(sequence: Sequence) -> Sequence:
    return sequence._replace(
        phase=next_phase(sequence.phase, Cause.ABORT), finish=sequence.finish or FinishReason.ABORT
    )


def _step_done(state: State, event: StepDone) -> tuple[State, tuple[Effect, ...]]:
    plan = _oldest_plan(state, event)
    tenants = _refunded(state, plan)
    sequences = {s.request.sequence_id: s for s in state.running}
    for row, result in zip(plan.rows, event.results):
        sequence_id = row[0]
        sequences[sequence_id] = _accept(sequences[sequence_id], row, result, state.config)
    named_blocks = _filled_blocks(plan, event.results, sequences, state.config.block_size)
    state = replace(
        state,
        running=tuple(sequences.values()),
        pool=register(state.pool, named_blocks) if named_blocks else state.pool,
        pending=state.pending[1:],
        in_flight=state.in_flight[1:],
        tenants=tenants,
    )
    if state.suspects:
        state = replace(state, suspects=without_cleared(state.suspects, plan, event.results))
    if not event.choices and not any(map(_CHILDREN, event.results)):
        return drain(state)
    state, effects = choose(state, event.choices)
    state, drained = drain(add_children(state, plan, event.results, event.choices))
    state, more = leave_for_slots(state, event.results + event.choices)
    return state, effects + drained + more


def _refunded(state: State, plan: StepPlan) -> Tenants:
    """The accounts without what was charged for tokens that are thrown away: their sequences had ended already."""
    ended = {s.sequence_id: s.request.tenant for s in state.running if s.phase in _ENDED}
    if not ended:
        return state.tenants
    thrown_away = Counter(ended[row.sequence_id] for row in plan.rows if row.samples and row.sequence_id in ended)
    return charge(state.tenants, {tenant: -SAMPLE_COST * count for tenant, count in thrown_away.items()})


def _oldest_plan(state: State, event: StepDone) -> StepPlan:
    plan = state.in_flight[0] if state.in_flight else None
    if plan is None or plan.plan_id != event.plan_id:
        raise SchedulerError(f"plan {event.plan_id} is not the oldest in flight")
    if list(map(_SEQUENCE_ID, plan.rows)) != list(map(_SEQUENCE_ID, event.results)):
        raise SchedulerError(f"the results of plan {event.plan_id} do not match its rows")
    return plan


def _accept(sequence: Sequence, row: Row, result: RowResult, config: SchedulerConfig) -> Sequence:
    """Confirm one row. What it gave is discarded if the sequence has ended in the meantime."""
    # Unpacked, and made by tuple.__new__: a quarter of the time of _replace, and this runs for every row of every step.
    _, start, length, _, samples, _ = row
    _, num_accepted, end, new_names, _ = result
    (
        request,
        arrival_us,
        phase,
        num_tokens,
        num_expected,
        _,
        num_planned,
        num_cached,
        num_in_flight,
        blocks,
        names,
        finish,
        stay,
    ) = sequence
    if phase is not Phase.FINISHING and phase is not Phase.ABORTING:
        num_tokens += num_accepted
        if num_accepted != samples or end is not None or num_tokens - request.prompt_len >= request.max_tokens:
            awaits_choice = request.needs_confirmation and not num_accepted and end is None
            if not awaits_choice:
                phase, finish = next_phase(phase, Cause.FINISH), _reason(sequence, row, result)
        if new_names and stay.named:
            names += new_names
            _check_names(sequence, len(names), num_tokens // config.block_size)
    accepted = (
        request,
        arrival_us,
        phase,
        num_tokens,
        num_expected,
        start + length,
        num_planned,
        num_cached,
        num_in_flight - 1,
        blocks,
        names,
        finish,
        stay,
    )
    return tuple.__new__(Sequence, accepted)


def _reason(sequence: Sequence, row: Row, result: RowResult) -> FinishReason:
    """Why a sequence ends with this row. Raises if the result is neither an end nor what a row gives that goes on."""
    if result.num_accepted not in (0, row.samples) or (result.finish is None and result.num_accepted != row.samples):
        raise SchedulerError(f"row {row} cannot accept {result.num_accepted} tokens")
    if result.finish is None:
        raise SchedulerError(f"sequence {sequence.sequence_id} has all its tokens and is not finished")
    if result.finish not in _REASONS:
        raise SchedulerError(f"sequence {sequence.sequence_id} ends for no known reason: {result.finish}")
    return FinishReason(result.finish)


def _check_names(sequence: Sequence, num_names: int, num_full: int) -> None:
    if num_names != num_full:
        raise SchedulerError(f"sequence {sequence.sequence_id} has {num_full} full blocks and {num_names} names")


def _filled_blocks(
    plan: StepPlan, results: tuple[RowResult, ...], sequences: dict[int, Sequence], block_size: int
) -> list[tuple[bytes, int]]:
    """The named blocks that a finished plan has computed, in its row order, but not those of rows that failed; and
    those that it has scattered."""
    named_blocks: list[tuple[bytes, int]] = []
    for (sequence_id, start, length, blocks, _, _), result in zip(plan.rows, results):
        end = start + length
        if end % block_size < length and result.finish != FinishReason.ABORT:
            filled = slice(start // block_size, end // block_size)
            named_blocks += zip(sequences[sequence_id].block_hashes[filled], blocks[filled])
    if plan.scatters:
        scattered = {block_id for scatter in plan.scatters for _, block_id in scatter.pairs}
        for row in plan.rows:
            named = zip(sequences[row.sequence_id].block_hashes[: row.start // block_size], row.blocks)
            named_blocks += [(name, block_id) for name, block_id in named if block_id in scattered]
    return named_blocks


_REASONS = frozenset(FinishReason)
_ENDED = (Phase.FINISHING, Phase.ABORTING)
# Half the time of an attribute by name, for what is read of every row of every step.
_SEQUENCE_ID, _CHILDREN = itemgetter(0), itemgetter(RowResult._fields.index("children"))
