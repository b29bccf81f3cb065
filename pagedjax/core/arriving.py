"""Take a request into the line, or say why not."""

from collections.abc import Mapping
from typing import Protocol

from pagedjax.core import waiting as lines
from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.effects import Effect, Reject
from pagedjax.core.errors import SchedulerError
from pagedjax.core.events import Arrived
from pagedjax.core.phases import Cause, Phase, next_phase
from pagedjax.core.request import Request
from pagedjax.core.state import Queue, Sequence, State, Stay
from pagedjax.core.tenants import enter


def arrived(state: State, event: Arrived) -> tuple[State, tuple[Effect, ...]]:
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
    credit = config.credit if _runs(state, request.tenant) else 0
    tenants = enter(state.tenants, request.tenant, state.waiting.queues, config.tenant_weights, credit)
    return state._replace(waiting=lines.enqueue(state.waiting, sequence), tenants=tenants), ()


def _runs(state: State, tenant: str) -> bool:
    return any(sequence.request.tenant == tenant for sequence in state.running)


def _check_request(state: State, request: Request) -> None:
    sequence_id = request.sequence_id
    if request.prompt_len < 1 or request.max_tokens < 1:
        raise SchedulerError(f"sequence {sequence_id} has nothing to compute: {request}")
    if sequence_id in state.waiting.places or any(s.request.sequence_id == sequence_id for s in state.running):
        raise SchedulerError(f"sequence {sequence_id} is here already")


class Line(Protocol):
    """Those who wait, in sequences and tokens, and by tenant."""

    def __len__(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def queues(self) -> Mapping[str, Queue]: ...


class Door(Protocol):
    """What decides whether a request may be queued: a State, or the part of one."""

    @property
    def config(self) -> SchedulerConfig: ...
    @property
    def waiting(self) -> Line: ...


def refusal(state: Door, request: Request) -> Reject | None:
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


def refused_param(state: Door, request: Request) -> str:
    """The field to blame for a refusal: what the request asks for beyond its prompt, if that alone would be taken."""
    return "prompt" if refusal(state, request._replace(max_tokens=1)) else "max_tokens"


def _queue_refusal(state: Door, request: Request) -> Reject | None:
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
