"""The HTTP app: its routes, its middleware, its life, and how faults are told."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagedjax.core.errors import RequestError
from serving import admin, asking, errors, generating
from serving.access.guard import Guard
from serving.access.keys import KeySource
from serving.edge import Edge
from serving.errors import json_response
from serving.interfaces import Engine
from serving.options import ApiOptions
from serving.requests import openapi
from serving.service import Service
from serving.telemetry import history
from serving.telemetry.tracing import Spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MAX_BODY_BYTES = 8 * 2**20


def create_app(
    engine: Engine,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    trust_tenant_header: bool = False,
    keys: KeySource = KeySource(),  # noqa: B008  (it is frozen)
    options: ApiOptions = ApiOptions(),  # noqa: B008
    tracer_provider: "TracerProvider | None" = None,
) -> Starlette:
    """The app over an engine, which it starts and stops with itself. `app.state.service` is its Service.

    Trust X-Tenant only behind a gateway that sets it: else callers choose whose share pays for them. Without a
    `tracer_provider` no spans are made; it stays the caller's to shut down. Raises ConfigError for keys that cannot be
    read.
    """
    service = Service(engine, trust_tenant_header=trust_tenant_header, keys=keys, options=options)
    route_of = {route.endpoint: route.path for route in ROUTES}
    edge = Middleware(
        Edge,
        metrics=service.http_metrics,
        route_of=route_of,
        max_body_bytes=max_body_bytes,
        log_form=options.access_log,
    )
    layers = [edge, Middleware(Guard, service=service)]
    if tracer_provider is not None:
        layers.insert(0, Middleware(Spans, provider=tracer_provider, engine=engine, route_of=route_of))
    handlers: dict[Any, Any] = {RequestError: _refuse, HTTPException: _refuse_http}
    app = Starlette(
        routes=ROUTES,
        middleware=layers,
        exception_handlers=handlers,
        lifespan=_lifespan,
    )
    # A path with a slash too many is not there: a redirect would name the scheme and host that a gateway hides.
    app.router.redirect_slashes = False
    app.state.service = service
    return app


async def openapi_document(request: Request) -> Response:
    routes = tuple((route.path, frozenset(route.methods or ())) for route in ROUTES)
    return json_response(openapi.document(routes))


ROUTES = [
    Route("/v1/completions", generating.completions, methods=["POST"]),
    Route("/v1/chat/completions", generating.chat_completions, methods=["POST"]),
    Route("/v1/responses", generating.responses, methods=["POST"]),
    Route("/v1/embeddings", generating.embeddings, methods=["POST"]),
    Route("/tokenize", generating.tokenize, methods=["POST"]),
    Route("/detokenize", generating.detokenize, methods=["POST"]),
    Route("/v1/requests/{request_id}/cancel", generating.cancel, methods=["POST"]),
    Route("/v1/models", asking.models, methods=["GET"]),
    Route("/v1/models/{model:path}", asking.model, methods=["GET"]),
    Route("/health", asking.health, methods=["GET"]),
    Route("/ready", asking.ready, methods=["GET"]),
    Route("/metrics", asking.metrics, methods=["GET"]),
    Route("/debug/state", asking.state, methods=["GET"]),
    Route("/openapi.json", openapi_document, methods=["GET"]),
    Route("/docs", asking.docs, methods=["GET"]),
    Route("/", asking.page, methods=["GET"]),
    *history.ROUTES,
    *admin.ROUTES,
]


_NAMES = {
    "/v1/chat/completions": {"prompt": "messages"},
    "/v1/responses": {"prompt": "input", "max_tokens": "max_output_tokens"},
    "/v1/embeddings": {"prompt": "input"},
}


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    service: Service = app.state.service
    service.start()
    try:
        yield
    finally:
        await service.stop()


async def _refuse(request: Request, error: Exception) -> Response:
    request.state.notes["error"] = errors.name_of(error)
    if isinstance(error, RequestError) and error.code in errors.CODES_OF_SIZE:
        # The engine names its own parameters.
        error.param = _NAMES.get(request.url.path, {}).get(error.param or "", error.param)
    return errors.error_response(error, request.state.request_id)


async def _refuse_http(request: Request, error: HTTPException) -> Response:
    """The router's own faults: no such path, or not with this method."""
    if error.status_code == 405:
        fault = RequestError(f"{request.method[:20]} is not allowed here", code="method_not_allowed")
    else:
        fault = RequestError(f"there is no {request.url.path[:200]}", code="not_found")
    response = await _refuse(request, fault)
    response.headers.update(error.headers or {})
    return response
