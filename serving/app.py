"""The HTTP app: routes parse, submit, stream, render."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive

from pagedjax.core.errors import RequestError
from pagedjax.core.request import SamplingParams
from serving import dashboard, errors
from serving.edge import Edge, read_body
from serving.errors import json_response
from serving.generation import ActiveRequests, Generation
from serving.interfaces import Engine, Stream
from serving.metrics import HttpMetrics
from serving.openai import ChatRendering, CompletionRendering, Head
from serving.schemas import ChatCall, ModelFacts, Prompt, parse_chat, parse_completion

MAX_BODY_BYTES = 8 * 2**20
BODY_TIMEOUT_S = 60.0
# Tokenizing this many characters takes about a millisecond; more is done beside the event loop.
MAX_INLINE_CHARS = 4_000
MESSAGE_CHARS = 32

T = TypeVar("T")


def create_app(engine: Engine, *, max_body_bytes: int = MAX_BODY_BYTES) -> Starlette:
    """The app over an engine, which it starts and stops with itself. `app.state.service` is its Service."""
    service = Service(engine)
    route_of = {route.endpoint: route.path for route in ROUTES}
    edge = Middleware(Edge, metrics=service.http_metrics, route_of=route_of, max_body_bytes=max_body_bytes)
    handlers: dict[Any, Any] = {RequestError: _refuse, HTTPException: _refuse_http}
    app = Starlette(routes=ROUTES, middleware=[edge], exception_handlers=handlers, lifespan=_lifespan)
    # A path with a slash too many is not there: a redirect would name the scheme and host that a gateway hides.
    app.router.redirect_slashes = False
    app.state.service = service
    return app


class Service:
    """What the routes share: the engine, the requests being answered, and whether new ones are taken."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.active = ActiveRequests()
        self.http_metrics = HttpMetrics()
        self.snapshots = dashboard.Snapshots(engine)
        # None: nobody asked for a start here, so the engine runs already.
        self.starting: asyncio.Task[None] | None = None
        self._draining = False
        self._arriving: set[asyncio.Timeout] = set()
        self._texts = ThreadPoolExecutor(2, "texts")

    def start(self) -> None:
        """Begin to start the engine; until it has, requests get 503 and /ready says no, but /health answers."""
        self.starting = asyncio.create_task(self.engine.start())

    async def stop(self) -> None:
        """An engine that is still loading is left behind: it cannot be interrupted, and has nothing to give up."""
        self.drain()
        if self.starting is None or (self.starting.done() and self.starting.exception() is None):
            await self.engine.stop()
        elif not self.starting.done():
            self.starting.cancel()
        self._texts.shutdown(wait=False, cancel_futures=True)

    def is_loading(self) -> bool:
        return self.starting is not None and not self.starting.done()

    def drain(self) -> None:
        """Take no new requests, not even those whose bodies are on their way; those that run go on."""
        self._draining = True
        self.engine.drain()
        for limit in self._arriving:
            if not limit.expired():
                limit.reschedule(0)

    def is_ready(self) -> bool:
        return self.engine.is_ready() and not self._draining and not self.is_loading()

    def check_open(self) -> None:
        if self._draining:
            raise RequestError("the server is shutting down and takes no new requests", code="draining")
        self.check_loaded()

    def check_loaded(self) -> None:
        if self.is_loading():
            raise RequestError("the model is still loading", code="not_ready")

    def model_facts(self) -> ModelFacts:
        engine = self.engine
        return ModelFacts(engine.model_name, engine.tokenizer.vocab_size, engine.max_model_len)

    async def read_body(self, receive: Receive) -> bytes:
        """The whole body. Raises RequestError request_timeout, and draining when a drain begins first."""
        limit = asyncio.timeout(BODY_TIMEOUT_S)
        self._arriving.add(limit)
        try:
            return await read_body(receive, limit)
        except TimeoutError:
            self.check_open()
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise RequestError(message, code="request_timeout") from None
        finally:
            self._arriving.discard(limit)

    async def work_on_text(self, num_chars: int, work: Callable[[], T]) -> T:
        """`work`, off the event loop when the text is long."""
        if num_chars <= MAX_INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, *, request_id: str, priority: int
    ) -> list[Stream]:
        """One stream a prompt; all of them, or RequestError and none."""
        streams: list[Stream] = []
        try:
            for i, prompt in enumerate(prompts):
                name = request_id if len(prompts) == 1 else f"{request_id}-{i}"
                streams.append(self.engine.submit(prompt, params, request_id=name, priority=priority))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams


# ---- generating ------------------------------------------------------------------------------------------------------


async def completions(request: Request) -> Generation:
    service = _service(request)
    call = parse_completion(await _json(request), service.model_facts())
    prompts = await service.work_on_text(_num_chars(call.prompts), lambda: _encode(service, call.prompts))
    head = _head(request, "cmpl")
    streams = service.submit(prompts, call.params, request_id=head.id, priority=call.priority)
    return Generation(streams, call, CompletionRendering(head, call, service.engine.tokenizer), service.active)


async def chat_completions(request: Request) -> Generation:
    service = _service(request)
    call = parse_chat(await _json(request), service.model_facts())
    num_chars = sum(MESSAGE_CHARS + len(message["content"]) for message in call.messages)
    prompt = await service.work_on_text(num_chars, lambda: _encode_chat(service, call))
    head = _head(request, "chatcmpl")
    streams = service.submit([prompt], call.params, request_id=head.id, priority=call.priority)
    return Generation(streams, call, ChatRendering(head, call, service.engine.tokenizer), service.active)


def _encode(service: Service, prompts: Sequence[Prompt]) -> list[list[int]]:
    encode = service.engine.tokenizer.encode
    encoded = [encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    if not all(encoded):
        raise RequestError("prompt is empty: it holds no token to continue from", param="prompt")
    return encoded


def _encode_chat(service: Service, call: ChatCall) -> list[int]:
    """The template writes the special tokens itself."""
    tokenizer = service.engine.tokenizer
    text = tokenizer.apply_chat_template(list(call.messages), add_generation_prompt=True)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    if not encoded:
        raise RequestError("the chat template made an empty prompt of these messages", param="messages")
    return encoded


def _num_chars(prompts: Sequence[Prompt]) -> int:
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str))


def _head(request: Request, prefix: str) -> Head:
    engine = _service(request).engine
    return Head(f"{prefix}-{request.state.request_id}", int(time.time()), engine.model_name)


async def _json(request: Request) -> Any:
    """The body's JSON value. Raises RequestError for what is no JSON: NaN, lone surrogates, over-deep nesting too."""
    service = _service(request)
    service.check_open()
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise RequestError("requests from pages of other origins are refused", code="cross_origin")
    body = await service.read_body(request.receive)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None


# ---- asking ----------------------------------------------------------------------------------------------------------


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_card(_service(request))]})


async def model(request: Request) -> Response:
    service, name = _service(request), request.path_params["model"]
    if name != service.engine.model_name:
        raise RequestError(f"the model {name[:100]!r} does not exist", param="model", code="model_not_found")
    return json_response(_model_card(service))


async def health(request: Request) -> Response:
    """Liveness: steps advance while there is work. A draining server is alive."""
    alive = _service(request).engine.is_alive()
    return json_response({"status": "ok" if alive else "dead"}, 200 if alive else 503)


async def ready(request: Request) -> Response:
    """Whether new requests are taken."""
    service = _service(request)
    is_ready = service.is_ready()
    status = "ready" if is_ready else "loading" if service.is_loading() else "not ready"
    return json_response({"status": status}, 200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    service = _service(request)
    text = generate_latest(service.http_metrics.registry)
    if not service.is_loading():
        text += generate_latest(service.engine.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def state(request: Request) -> Response:
    service = _service(request)
    service.check_loaded()
    return json_response(service.snapshots.latest(), headers={"cache-control": "no-store"})


async def page(request: Request) -> Response:
    return Response(dashboard.page(), headers=dashboard.PAGE_HEADERS, media_type="text/html")


ROUTES = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{model:path}", model, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/debug/state", state, methods=["GET"]),
    Route("/", page, methods=["GET"]),
]


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _model_card(service: Service) -> dict[str, Any]:
    service.check_loaded()
    engine = service.engine
    return {
        "id": engine.model_name,
        "object": "model",
        "created": engine.created,
        "owned_by": "pagedjax",
        "max_model_len": engine.max_model_len,
    }


# ---- life and faults -------------------------------------------------------------------------------------------------


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
