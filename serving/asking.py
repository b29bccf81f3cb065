"""The routes that only tell: models, health, metrics, the scheduler's state, and pages."""

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from pagedjax.core.errors import RequestError
from pagedjax.core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from pagedjax.core.structure import MAX_GRAMMAR_BYTES
from pagedjax.engine.outputs import EngineError
from serving.access.guard import operators_only
from serving.errors import json_response, retry_headers
from serving.requests.inputs import MAX_PROMPTS
from serving.service import Service, service_of
from serving.telemetry import dashboard
from serving.tools import tools


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_card(service_of(request))]})


async def model(request: Request) -> Response:
    service, name = service_of(request), request.path_params["model"]
    if not name:
        raise RequestError("there is no /v1/models/; GET /v1/models lists the models", code="not_found")
    if name != service.engine.model_name:
        raise RequestError(f"the model {name[:100]!r} does not exist", param="model", code="model_not_found")
    return json_response(_model_card(service))


async def health(request: Request) -> Response:
    """Liveness: steps advance while there is work. A draining server is alive."""
    status = service_of(request).health()
    return json_response({"status": status}, 200 if status == "ok" else 503)


async def ready(request: Request) -> Response:
    """Whether new requests are taken, and if not, why."""
    state = service_of(request).readiness()
    status = 200 if state == "ready" else 503
    return json_response({"status": state}, status, retry_headers(status))


@operators_only
async def metrics(request: Request) -> Response:
    service = service_of(request)
    text = generate_latest(service.http_metrics.registry)
    if not service.is_loading():
        text += await _engine_metrics(service)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _engine_metrics(service: Service) -> bytes:
    """Nothing of an engine that has gone with its process: what the server knows itself is then all there is."""
    try:
        return await service.engine.render_metrics()
    except EngineError:
        return b""


@operators_only
async def state(request: Request) -> Response:
    service = service_of(request)
    service.check_loaded()
    return json_response(await service.snapshots.latest(), headers={"cache-control": "no-store"})


async def page(request: Request) -> Response:
    return Response(dashboard.page(), headers=dashboard.PAGE_HEADERS, media_type="text/html")


async def docs(request: Request) -> Response:
    return Response(dashboard.page("docs.html"), headers=dashboard.PAGE_HEADERS, media_type="text/html")


def _model_card(service: Service) -> dict[str, Any]:
    service.check_loaded()
    engine = service.engine
    return {
        "id": engine.model_name,
        "object": "model",
        "created": engine.created,
        "owned_by": "pagedjax",
        "max_model_len": engine.max_model_len,
        "limits": {
            "vocab_size": engine.tokenizer.vocab_size,
            "n": MAX_N,
            "logprobs": MAX_LOGPROBS,
            "stop": MAX_STOP_STRINGS,
            "logit_bias": MAX_LOGIT_BIAS,
            "prompts": MAX_PROMPTS,
            "tools": tools.MAX_TOOLS,
            "grammar_bytes": MAX_GRAMMAR_BYTES,
        },
    }
