"""What the routes share: the engine, who may use it how much, and whether new requests are taken."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from starlette.requests import Request

from pagedjax.core.errors import ConfigError, RequestError
from serving.access.guard import Caller
from serving.access.keys import ApiKey, KeySource
from serving.access.limits import Limits
from serving.active import ActiveRequests
from serving.edge import read_body
from serving.interfaces import Engine, Stream
from serving.options import ApiOptions
from serving.requests import shapes
from serving.requests.inputs import ModelFacts
from serving.requests.reading import Call, read
from serving.telemetry import dashboard
from serving.telemetry.metrics import HttpMetrics
from serving.workers import MAX_INLINE_BYTES, Workers

if TYPE_CHECKING:
    from pagedjax.engine.submission import Submission

BODY_TIMEOUT_S = 60.0

Answer = TypeVar("Answer")


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
        self.http_metrics.watch(self.health, lambda: self.engine.step_age_s())

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

    def health(self) -> Literal["ok", "stuck", "failed"]:
        """Whether the step loop is there, and moves while there is work. What loads or drains is well."""
        if self.is_loading():
            return "ok"
        if not self.engine.is_alive():
            return "failed"
        limit_s = self.options.step_timeout_s
        return "stuck" if limit_s and self.engine.step_age_s() > limit_s else "ok"

    def readiness(self) -> str:
        """ready, or why no new requests are taken."""
        if self._draining:
            return "draining"
        if self.is_loading():
            return "loading"
        if self.engine.is_ready():
            return "ready"
        return "queue full" if self.engine.is_full() else "not ready"

    def time_limit_s(self, asked_s: float | None) -> float | None:
        """Seconds from its arrival that a request has for its answer: its own wish, within the server's limit."""
        limits = [limit_s for limit_s in (asked_s, self.options.request_timeout_s or None) if limit_s is not None]
        return min(limits, default=None)

    def check_open(self) -> None:
        if self._draining:
            raise RequestError("the server is shutting down and takes no new requests", code="draining")
        self.check_loaded()
        if not self.engine.is_alive():
            raise RequestError("the engine has stopped; the server ends, and takes no new requests", code="not_ready")

    def check_loaded(self) -> None:
        if self.is_loading():
            raise RequestError("the model is still loading", code="not_ready")

    async def read(
        self, request: Request, response_id: str, parse: Callable[[Any, ModelFacts], Call]
    ) -> tuple[Call, list["Submission"]]:
        """The request's call, and what to submit for it. Raises RequestError."""
        self.check_open()
        caller: Caller = request.state.caller
        with self._limited(request, caller):
            if caller.key is not None:
                self.limits.take_request(caller.key)
        body = await self._body(request)
        num_bytes = max(len(body), MAX_INLINE_BYTES + 1) if any(mark in body for mark in shapes.MARKS) else len(body)
        return await self.workers.read(
            num_bytes, lambda: read(self.engine, body, parse, response_id, caller.tenant, self.options)
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
        load = self.engine.load()
        num_new = sum(submission.params.num_samples for submission in submissions)
        # Counted from what is being answered: the engine may not have seen the latest yet.
        num_waiting = self.active.num_sequences(tenant) - load.running.get(tenant, 0)
        most = max(1, int(load.config.max_queued_requests * key.queue_share))
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


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
