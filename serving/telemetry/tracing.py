"""OpenTelemetry: a span for each request, under its caller's (W3C traceparent), and one for each phase of its life.

Names follow the semantic conventions for HTTP and for generative AI; no prompts and no answers are in spans. A span is
made when its request has been answered, of what the scheduler's events tell of it then (`pagedjax.engine.lives`), so
tracing adds nothing to the steps and nothing to the time that a client waits.

OpenTelemetry is optional (pip install 'pagedjax[otel]'): nothing of it is imported unless spans are wanted.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import pagedjax
from pagedjax.core.errors import ConfigError
from pagedjax.engine.outputs import EngineError
from serving.interfaces import Engine
from serving.telemetry.access_log import POLLED

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from pagedjax.core.request import SamplingParams
    from pagedjax.engine.lives import LifeStory, Moment

# What may happen to a request between its phases; shown as events of its span.
_INTERRUPTIONS = frozenset(
    {"preempted", "swap_out", "stored", "fetch", "fetched", "transfer_failed", "resumed", "aborted", "refused"}
)


class Generated(NamedTuple):
    """What a generating route tells of an answer, in `scope["state"]["generated"]`. `prompt_ids` are the names that
    the engine has for the request's prompts."""

    operation: str
    model: str
    response_id: str
    params: "SamplingParams"
    prompt_ids: tuple[str, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: tuple[str, ...]


class Phase(NamedTuple):
    """Part of a request's life; times in microseconds of the scheduler's clock."""

    name: str
    begin_us: int
    end_us: int


def provider_to(endpoint: str) -> "TracerProvider":
    """Sends spans to this URL by OTLP over HTTP. OTEL_* variables set what OpenTelemetry has them for, such as the
    sampler and the headers. Raises ConfigError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry, which is not installed: pip install 'pagedjax[otel]'"
        ) from error
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-traces-endpoint {endpoint!r} is no URL; try http://localhost:4318/v1/traces")
    named = Resource.create({"service.name": "pagedjax"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Spans:
    """ASGI middleware around everything else, so that what it does counts as nobody's waiting."""

    def __init__(
        self, app: ASGIApp, *, provider: "TracerProvider", engine: Engine, route_of: Mapping[Any, str]
    ) -> None:
        self._app, self._engine, self._route_of = app, engine, route_of
        self._tracer = provider.get_tracer("pagedjax", pagedjax.__version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_ns, status, first_ns = time.time_ns(), 0, 0

        async def watched(message: Message) -> None:
            nonlocal status, first_ns
            if message["type"] == "http.response.start":
                status, first_ns = message["status"], time.time_ns()
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = self._route_of.get(scope.get("endpoint"), "unmatched")
            if route not in POLLED:
                await self._tell(scope, route, status, began_ns, (first_ns or time.time_ns()) - began_ns)

    async def _tell(self, scope: Scope, route: str, status: int, began_ns: int, first_ns: int) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended_ns, generated = time.time_ns(), scope["state"].get("generated")
        span = self._tracer.start_span(
            span_name(scope["method"], route, generated),
            context=TraceContextTextMapPropagator().extract(dict(Headers(scope=scope))),
            kind=SpanKind.SERVER,
            start_time=began_ns,
            attributes=http_attributes(scope, route, status),
        )
        if span.is_recording() and generated is not None:
            span.set_attributes(generation_attributes(generated, first_ns / 1e9))
            for story in await self._stories(generated):
                self._tell_life(span, story)
        if status == 0 or status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(ended_ns)

    async def _stories(self, generated: Generated) -> "list[LifeStory]":
        try:
            return [story for name in generated.prompt_ids for story in await self._engine.lives(name)]
        except EngineError:
            return []  # the engine has gone with its process

    def _tell_life(self, span: "Span", story: "LifeStory") -> None:
        from opentelemetry.trace import set_span_in_context

        parent, begin_us = set_span_in_context(span), story.moments[0].at_us

        def wall_ns(at_us: int) -> int:
            return int(story.arrival_s * 1e9) + (at_us - begin_us) * 1000

        for phase in phases(story.moments):
            child = self._tracer.start_span(phase.name, context=parent, start_time=wall_ns(phase.begin_us))
            child.end(wall_ns(phase.end_us))
        for moment in story.moments:
            if moment.event in _INTERRUPTIONS:
                span.add_event(moment.event, moment.facts, wall_ns(moment.at_us))


def span_name(method: str, route: str, generated: Generated | None) -> str:
    return f"{method} {route}" if generated is None else f"{generated.operation} {generated.model}"


def http_attributes(scope: Scope, route: str, status: int) -> dict[str, Any]:
    caller, error = scope["state"].get("caller"), scope["state"]["notes"].get("error")
    found = {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": status or None,
        "error.type": error,
        "pagedjax.tenant": caller and caller.tenant,
        "pagedjax.request_id": scope["state"]["request_id"],
    }
    return {name: value for name, value in found.items() if value is not None}


def generation_attributes(generated: Generated, first_chunk_s: float) -> dict[str, Any]:
    params = generated.params
    found = {
        "gen_ai.operation.name": generated.operation,
        "gen_ai.provider.name": "pagedjax",
        "gen_ai.request.model": generated.model,
        "gen_ai.response.model": generated.model,
        "gen_ai.response.id": generated.response_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.usage.input_tokens": generated.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": generated.num_cached_tokens,
        "gen_ai.usage.output_tokens": generated.num_output_tokens,
        "gen_ai.response.finish_reasons": generated.finish_reasons,
        "gen_ai.response.time_to_first_chunk": first_chunk_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def phases(moments: "Sequence[Moment]") -> Iterator[Phase]:
    """queue, prefill and decode, as far as a life has come; each ends where the next begins."""
    starts = {"queue": "queued", "prefill": "admitted", "decode": "first_token"}
    begun = [(name, found) for name, event in starts.items() if (found := _first(moments, event)) is not None]
    last = max(moment.at_us for moment in moments)
    ends = [moment.at_us for moment in moments if moment.event == "last_token"]
    for (name, begin_us), end_us in zip(begun, [*(at_us for _, at_us in begun[1:]), max(ends, default=last)]):
        yield Phase(name, begin_us, end_us)


def _first(moments: "Sequence[Moment]", event: str) -> int | None:
    return next((moment.at_us for moment in moments if moment.event == event), None)
