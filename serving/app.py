"""The HTTP app: routes parse, submit, stream, render."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from pagedjax.core.structure import MAX_GRAMMAR_BYTES
from serving import admin, dashboard, errors, openapi, shapes, tokenizing, tools
from serving.edge import Edge, read_body
from serving.embedding import EmbeddingCall, EmbeddingRendering
from serving.errors import json_response
from serving.generation import Active, ActiveRequests, Generation
from serving.guard import Caller, Guard, operators_only
from serving.inputs import MAX_PROMPTS
from serving.interfaces import Engine, Stream
from serving.keys import ApiKey, KeySource
from serving.limits import Limits
from serving.metrics import HttpMetrics
from serving.openai import ChatRendering, CompletionRendering, Head, Rendering
from serving.options import ApiOptions
from serving.reading import Call, Read, read_chat, read_completion, read_embedding, read_response
from serving.responses import ResponseRendering
from serving.schemas import ChatCall, CompletionCall
from serving.workers import MAX_INLINE_BYTES, Workers

if TYPE_CHECKING:
    from pagedjax.engine.submission import Submission

MAX_BODY_BYTES = 8 * 2**20
BODY_TIMEOUT_S = 60.0

Answer = TypeVar("Answer")


def create_app(
    engine: Engine,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    trust_tenant_header: bool = False,
    keys: KeySource = KeySource(),  # noqa: B008  (it is frozen)
    options: ApiOptions = ApiOptions(),  # noqa: B008
) -> Starlette:
    """The app over an engine, which it starts and stops with itself. `app.state.service` is its Service.

    Trust X-Tenant only behind a gateway that sets it: else callers choose whose share pays for them. Raises
    ConfigError for keys that cannot be read.
    """
    service = Service(engine, trust_tenant_header=trust_tenant_header, keys=keys, options=options)
    route_of = {route.endpoint: route.path for route in ROUTES}
    edge = Middleware(Edge, metrics=service.http_metrics, route_of=route_of, max_body_bytes=max_body_bytes)
    handlers: dict[Any, Any] = {RequestError: _refuse, HTTPException: _refuse_http}
    app = Starlette(
        routes=ROUTES,
        middleware=[edge, Middleware(Guard, service=service)],
        exception_handlers=handlers,
        lifespan=_lifespan,
    )
    # A path with a slash too many is not there: a redirect would name the scheme and host that a gateway hides.
    app.router.redirect_slashes = False
    app.state.service = service
    return app


class Service:
    """What the routes share: the engine, the requests being answered, and whether new ones are taken."""

    def __init__(
        self,
        engine: Engine,
        *,
        trust_tenant_header: bool = False,
        keys: KeySource = KeySource(),  # noqa: B008
        options: ApiOptions = ApiOptions(),  # noqa: B008
    ) -> None:
        self.engine = engine
        self.keys: tuple[ApiKey, ...] = keys.load()
        self.limits = Limits()
        self.options = options
        self._key_source = keys
        self.trust_tenant_header = trust_tenant_header
        self.active = ActiveRequests()
        self.http_metrics = HttpMetrics()
        self.snapshots = dashboard.Snapshots(engine)
        # None: nobody asked for a start here, so the engine runs already.
        self.starting: asyncio.Task[None] | None = None
        self._draining = False
        self._arriving: set[asyncio.Timeout] = set()
        self.workers = Workers()

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
        self.workers.stop()

    def is_loading(self) -> bool:
        return self.starting is not None and not self.starting.done()

    def drain(self) -> None:
        """Take no new requests, not even those whose bodies are on their way; those that run go on."""
        self._draining = True
        self.engine.drain()
        for limit in self._arriving:
            if not limit.expired():
                limit.reschedule(0)

    def readiness(self) -> str:
        """ready, or why no new requests are taken."""
        if self._draining:
            return "draining"
        if self.is_loading():
            return "loading"
        if self.engine.is_ready():
            return "ready"
        return "queue full" if self.engine.is_full() else "not ready"

    def check_open(self) -> None:
        if self._draining:
            raise RequestError("the server is shutting down and takes no new requests", code="draining")
        self.check_loaded()

    def check_loaded(self) -> None:
        if self.is_loading():
            raise RequestError("the model is still loading", code="not_ready")

    async def read(self, request: Request, response_id: str, read: Read[Call]) -> tuple[Call, list["Submission"]]:
        """The request's call, and what to submit for it. Raises RequestError."""
        self.check_open()
        caller: Caller = request.state.caller
        with self._limited(request, caller):
            if caller.key is not None:
                self.limits.take_request(caller.key)
        body = await self._body(request)
        num_bytes = max(len(body), MAX_INLINE_BYTES + 1) if any(mark in body for mark in shapes.MARKS) else len(body)
        return await self.workers.read(
            num_bytes, lambda: read(self.engine, body, response_id, caller.tenant, self.options)
        )

    async def compute(self, request: Request, work: Callable[[Engine, bytes, ApiOptions], Answer]) -> Answer:
        """What needs the model's tokenizer alone. Counts as a request. Raises RequestError."""
        self.check_loaded()
        caller: Caller = request.state.caller
        with self._limited(request, caller):
            if caller.key is not None:
                self.limits.take_request(caller.key)
        body = await self._body(request)
        return await self.workers.read(len(body), lambda: work(self.engine, body, self.options))

    def submit(self, request: Request, submissions: Sequence["Submission"], streams: bool = True) -> Sequence[Stream]:
        """Queue what was read, within what the caller's key allows. Raises RequestError."""
        caller: Caller = request.state.caller
        if caller.key is not None:
            self._check_key(caller.key, caller.tenant, submissions)
            with self._limited(request, caller):
                self.limits.take_prompt(caller.key, sum(len(one.prompt_token_ids) for one in submissions))
        return self.engine.submit_all(submissions)

    def reload_keys(self) -> int:
        """Read the keys again; gives their number. Raises ConfigError, and then the old ones stay."""
        found = self._key_source.load()
        if self.keys and not found:
            raise ConfigError("there are none any more, and the server would be open to all")
        self.keys = found
        self.limits.keep(found)
        return len(found)

    @contextmanager
    def _limited(self, request: Request, caller: Caller) -> Iterator[None]:
        """Tell the client what is left of its limits, and when to come back if it is nothing."""
        try:
            yield
        except RequestError as error:
            if caller.key is not None and error.code == "rate_limit_exceeded":
                request.state.headers["retry-after"] = str(self.limits.seconds_until_allowed(caller.key))
            raise
        finally:
            if caller.key is not None:
                request.state.headers.update(self.limits.headers(caller.key))

    def _check_key(self, key: ApiKey, tenant: str, submissions: Sequence["Submission"]) -> None:
        best = min(submission.priority for submission in submissions)
        if best < key.priority_cap:
            message = f"your key allows priorities from {key.priority_cap} (lower goes first), not {best}"
            raise RequestError(message, param="priority", code="priority_not_allowed")
        if key.queue_share == 1:
            return
        state = self.engine.state()
        num_new = sum(submission.params.num_samples for submission in submissions)
        # Counted from what is being answered: the engine may not have seen the latest yet.
        num_running = sum(sequence.request.tenant == tenant for sequence in state.running)
        num_waiting = self.active.num_sequences(tenant) - num_running
        most = max(1, int(state.config.max_queued_requests * key.queue_share))
        if num_waiting + num_new > most:
            message = f"The queue of tenant {tenant} is full: your key may fill {most} of its places."
            raise RequestError(message, code="queue_full")

    async def _body(self, request: Request) -> bytes:
        """The whole body. Raises RequestError request_timeout, and draining when a drain begins first."""
        limit = asyncio.timeout(BODY_TIMEOUT_S)
        self._arriving.add(limit)
        try:
            return await read_body(request.receive, limit)
        except TimeoutError:
            self.check_open()
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise RequestError(message, code="request_timeout") from None
        finally:
            self._arriving.discard(limit)


# ---- generating ------------------------------------------------------------------------------------------------------


async def completions(request: Request) -> Generation:
    service, head = _service(request), _head(request, "cmpl")
    call, submissions = await service.read(request, head.id, read_completion)
    rendering = CompletionRendering(head, call, service.engine.tokenizer)
    return _generation(request, head, call, submissions, rendering)


async def chat_completions(request: Request) -> Generation:
    service, head = _service(request), _head(request, "chatcmpl")
    call, submissions = await service.read(request, head.id, read_chat)
    tokenizer, wish = service.engine.tokenizer, service.options.tool_call_parser
    tool_format = tools.format_for(tokenizer.chat_template_text) if wish == "auto" else wish
    return _generation(request, head, call, submissions, ChatRendering(head, call, tokenizer, tool_format))


async def embeddings(request: Request) -> Generation:
    head = _head(request, "embd")
    call, submissions = await _service(request).read(request, head.id, read_embedding)
    return _generation(request, head, call, submissions, EmbeddingRendering(head, call))


async def responses(request: Request) -> Generation:
    service, head = _service(request), _head(request, "resp")
    call, submissions = await service.read(request, head.id, read_response)
    rendering = ResponseRendering(head, call, service.engine.tokenizer)
    return _generation(request, head, call.chat, submissions, rendering)


async def tokenize(request: Request) -> Response:
    return json_response(await _service(request).compute(request, tokenizing.tokenize))


async def detokenize(request: Request) -> Response:
    return json_response(await _service(request).compute(request, tokenizing.detokenize))


async def cancel(request: Request) -> Response:
    """End one's own request with an error; an admin key may end anybody's."""
    service, request_id, caller = _service(request), request.path_params["request_id"], request.state.caller
    if not service.active.cancel(request_id, tenant=None if caller.is_admin else caller.tenant):
        raise RequestError(f"no request {errors.clean(request_id[:100])} is being answered", code="not_found")
    return json_response({"id": request_id, "object": "request", "status": "cancelled"})


def _generation(
    request: Request,
    head: Head,
    call: CompletionCall | ChatCall | EmbeddingCall,
    submissions: Sequence["Submission"],
    rendering: Rendering,
) -> Generation:
    service, caller = _service(request), request.state.caller
    streams = service.submit(request, submissions)

    def charge(num_tokens: int) -> None:
        if caller.key is not None:
            service.limits.charge_output(caller.key, num_tokens)

    active = Active(
        head.id,
        caller.tenant,
        request.url.path,
        num_prompt_tokens=sum(len(stream.prompt_token_ids) for stream in streams),
        num_sequences=sum(one.params.num_samples for one in submissions),
        charge=charge,
    )
    return Generation(streams, call, rendering, service, active)


def _head(request: Request, prefix: str) -> Head:
    engine = _service(request).engine
    return Head(f"{prefix}-{request.state.request_id}", int(time.time()), engine.model_name)


# ---- asking ----------------------------------------------------------------------------------------------------------


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_card(_service(request))]})


async def model(request: Request) -> Response:
    service, name = _service(request), request.path_params["model"]
    if not name:
        raise RequestError("there is no /v1/models/; GET /v1/models lists the models", code="not_found")
    if name != service.engine.model_name:
        raise RequestError(f"the model {name[:100]!r} does not exist", param="model", code="model_not_found")
    return json_response(_model_card(service))


async def health(request: Request) -> Response:
    """Liveness: steps advance while there is work. A draining server is alive."""
    alive = _service(request).engine.is_alive()
    return json_response({"status": "ok" if alive else "dead"}, 200 if alive else 503)


async def ready(request: Request) -> Response:
    """Whether new requests are taken, and if not, why."""
    status = _service(request).readiness()
    return json_response({"status": status}, 200 if status == "ready" else 503)


@operators_only
async def metrics(request: Request) -> Response:
    service = _service(request)
    text = generate_latest(service.http_metrics.registry)
    if not service.is_loading():
        text += generate_latest(service.engine.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@operators_only
async def state(request: Request) -> Response:
    service = _service(request)
    service.check_loaded()
    return json_response(service.snapshots.latest(), headers={"cache-control": "no-store"})


async def page(request: Request) -> Response:
    return Response(dashboard.page(), headers=dashboard.PAGE_HEADERS, media_type="text/html")


async def openapi_document(request: Request) -> Response:
    routes = tuple((route.path, frozenset(route.methods or ())) for route in ROUTES)
    return json_response(openapi.document(routes))


async def docs(request: Request) -> Response:
    return Response(dashboard.page("docs.html"), headers=dashboard.PAGE_HEADERS, media_type="text/html")


ROUTES = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/requests/{request_id}/cancel", cancel, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{model:path}", model, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/debug/state", state, methods=["GET"]),
    Route("/openapi.json", openapi_document, methods=["GET"]),
    Route("/docs", docs, methods=["GET"]),
    Route("/", page, methods=["GET"]),
    *admin.ROUTES,
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


# ---- life and faults -------------------------------------------------------------------------------------------------


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
