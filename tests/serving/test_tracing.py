"""OpenTelemetry's spans: one a request, under the caller's, with its phases; and nothing where none are wanted."""

import builtins
import json

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pagedjax.core.errors import ConfigError
from pagedjax.engine.lives import LifeStory, Moment
from pagedjax.engine.outputs import EngineError
from serving.access.keys import KeySource
from serving.telemetry import tracing
from tests.serving.test_engine import make_async_engine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


@pytest.fixture
def traced(client_of, engine, provider):
    return client_of(engine, tracer_provider=provider)


def spans(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_under_its_caller_s_with_its_phases_inside(serving_of, provider, exporter):
    with serving_of(make_async_engine(), tracer_provider=provider) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"model": "counting", "prompt": "abc", "max_tokens": 4, "temperature": 0.5}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30).json()
    found = spans(exporter)
    assert set(found) == {"text_completion counting", "queue", "prefill", "decode"}
    root = found["text_completion counting"]
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == PARENT
    assert root.kind is SpanKind.SERVER and root.status.status_code is StatusCode.UNSET
    assert root.attributes["gen_ai.response.id"] == answer["id"]
    assert root.attributes["gen_ai.usage.input_tokens"] == 3 and root.attributes["gen_ai.usage.output_tokens"] == 4
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.attributes["gen_ai.request.temperature"] == 0.5
    phases = [found[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent.span_id == root.context.span_id for phase in phases)
    assert [one.end_time for one in phases[:2]] == [one.start_time for one in phases[1:]]
    assert root.start_time <= phases[0].start_time + 10**7 and phases[2].end_time <= root.end_time + 10**7


def test_without_a_caller_s_span_there_is_a_new_trace(traced, exporter):
    traced.get("/v1/models")
    (span,) = exporter.get_finished_spans()
    assert span.name == "GET /v1/models" and span.parent is None
    assert span.attributes["http.response.status_code"] == 200


def test_a_caller_that_does_not_sample_has_no_span(traced, exporter):
    traced.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert exporter.get_finished_spans() == ()


def test_failures_are_marked_and_refusals_named(traced, engine, exporter):
    engine.fail_after = 0
    traced.complete()
    engine.fail_after = None
    traced.complete(n=0)
    failed, refused = exporter.get_finished_spans()
    assert failed.status.status_code is StatusCode.ERROR and failed.attributes["error.type"] == "internal_error"
    assert refused.status.status_code is StatusCode.UNSET and refused.attributes["error.type"] == "invalid_request"


def test_interruptions_are_events_and_no_text_is_in_a_span(traced, engine, exporter):
    moments = (
        Moment(0, 1, "queued", {}),
        Moment(10, 1, "admitted", {"cached_tokens": 0}),
        Moment(20, 1, "preempted", {"reason": "memory", "method": "swap", "lost_tokens": 0}),
    )

    async def lives(request_id):
        return [LifeStory(request_id, "default", 0, 2, 16, 1.79e9, False, 0, moments)]

    engine.lives = lives
    traced.chat(messages=[{"role": "user", "content": "private words"}], user="somebody")
    found = spans(exporter)
    assert set(found) == {"chat tiny", "queue", "prefill"}
    (event,) = found["chat tiny"].events
    assert event.name == "preempted" and event.attributes["reason"] == "memory"
    assert event.timestamp == 1_790_000_000_000_020_000
    shown = "".join(span.to_json() for span in found.values())
    assert not any(word in shown for word in ("private", "Hello", "somebody"))


def test_an_engine_that_has_gone_costs_the_phases_only(traced, engine, exporter):
    async def lives(request_id):
        raise EngineError("gone")

    engine.lives = lives
    assert traced.complete().status_code == 200
    assert set(spans(exporter)) == {"text_completion tiny"}


def test_no_key_is_in_a_span_and_probes_have_none(client_of, engine, provider, exporter):
    keyed = client_of(engine, tracer_provider=provider, keys=KeySource(None, (("user", "user-key-0123456789"),)))
    keyed.get("/health")
    keyed.get("/v1/models", headers={"authorization": "Bearer user-key-0123456789"})
    keyed.get("/v1/models", headers={"authorization": "Bearer wrong-key-0123456789"})
    first, second = exporter.get_finished_spans()
    assert "0123456789" not in first.to_json() + second.to_json()
    assert json.loads(second.to_json())["attributes"]["error.type"] == "invalid_api_key"


def test_the_missing_extra_is_named(monkeypatch):
    plain = builtins.__import__

    def without(name, *rest, **options):
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return plain(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'pagedjax\[otel\]'"):
        tracing.provider_to("http://localhost:4318/v1/traces")


def test_an_endpoint_that_is_no_url_is_refused():
    with pytest.raises(ConfigError, match="localhost:4318"):
        tracing.provider_to("localhost:4317")


def test_spans_go_out_under_the_service_s_name():
    provider = tracing.provider_to("http://127.0.0.1:9/v1/traces")
    assert provider.resource.attributes["service.name"] == "pagedjax"
    provider.shutdown()
