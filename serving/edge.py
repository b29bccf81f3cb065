"""The outermost layer of every request: its id, the body's limits, counts, the access log, and the last resort."""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.core.errors import RequestError
from serving import errors
from serving.telemetry import access_log
from serving.telemetry.access_log import AccessLogForm
from serving.telemetry.metrics import METHODS, HttpMetrics

log = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499
# Seconds that a refused client has to stop sending, so that it reads why: enough for what is on its way over a slow
# line, too little to hold connections open with.
LINGER_S = 5.0


class Edge:
    """ASGI middleware. Puts `request_id`, `arrival_s` (monotonic), `notes` and `headers` into scope["state"]: notes
    become fields of the access log, headers those of the answer. `send_on` there passes all layers by: none looks at
    what an answer has between its first message and its last, and each would cost every token a call.

    `route_of` gives an endpoint's path template, which is what metrics and logs call it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: HttpMetrics,
        route_of: Mapping[Any, str],
        max_body_bytes: int,
        log_form: AccessLogForm = "text",
    ) -> None:
        self._app, self._metrics, self._route_of, self._max_body_bytes = app, metrics, route_of, max_body_bytes
        self._log_form = log_form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, began = secrets.token_hex(12), time.perf_counter()
        notes: dict[str, Any] = {}
        headers: dict[str, str] = {}
        arrival_s = time.monotonic()
        scope.setdefault("state", {}).update(
            request_id=request_id, notes=notes, headers=headers, arrival_s=arrival_s, send_on=send
        )
        status, first_byte_s, lingers = 0, None, False
        body = Body(receive, Headers(scope=scope), self._max_body_bytes)

        async def send_with_id(message: Message) -> None:
            nonlocal status, first_byte_s, lingers
            if message["type"] == "http.response.start":
                status, first_byte_s = message["status"], time.perf_counter() - began
                MutableHeaders(scope=message).update({"x-request-id": request_id, **headers})
            elif not message.get("more_body") and not body.is_over and _is_last_request(scope):
                message, lingers = {**message, "more_body": True}, True
            await send(message)

        self._metrics.begin()
        try:
            await self._app(scope, body, send_with_id)
        except errors.ClientGone as gone:
            notes["error"] = errors.name_of(gone)
        except Exception as error:
            notes["error"] = errors.name_of(error)
            log.exception("event=request_failed id=%s", request_id)
            if status:
                raise
            await errors.error_response(error, request_id)(scope, receive, send_with_id)
        finally:
            self._finish(scope, status or CLIENT_GONE_STATUS, time.perf_counter() - began, first_byte_s)
        if lingers:
            # After the books are closed: the whole answer is out, and what the client does now is none of its time.
            await body.drain()
            await send({"type": "http.response.body"})

    def _finish(self, scope: Scope, status: int, duration_s: float, first_byte_s: float | None) -> None:
        state, caller = scope["state"], scope["state"].get("caller")
        route = self._route_of.get(scope.get("endpoint"), "unmatched")
        self._metrics.end(route, scope["method"], status, state["notes"].get("error"), duration_s)
        method = scope["method"] if scope["method"] in METHODS else "other"
        tenant = caller and errors.clean(caller.tenant[:64])
        entry = (state["request_id"], method, route, status, tenant, duration_s, first_byte_s, state["notes"])
        access_log.write(self._log_form, access_log.Entry(*entry))


class Body:
    """`receive` that refuses bodies over `max_bytes`, announced or not (RequestError body_too_large), and packed ones
    (unsupported_encoding). `is_over` once nothing more of the body comes; `drain` takes what does."""

    def __init__(self, receive: Receive, headers: Headers, max_bytes: int) -> None:
        self._receive, self._headers, self._max_bytes = receive, headers, max_bytes
        self._num_bytes = 0
        self.is_over = False

    async def __call__(self) -> Message:
        if (encoding := self._headers.get("content-encoding", "identity")) != "identity":
            raise _packed(encoding)
        announced = self._headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise _too_large(self._max_bytes)
        message = await self._take()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        return message

    async def drain(self) -> None:
        """Forget what still comes, for LINGER_S at most: a connection that is closed over it is reset, and the client
        that is still sending loses its answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self.is_over:
                    await self._take()

    async def _take(self) -> Message:
        message = await self._receive()
        self.is_over = not message.get("more_body", False)
        return message


def _is_last_request(scope: Scope) -> bool:
    """Whether the client wants the connection closed behind the answer. The server may close it for reasons of its own,
    which do not show here."""
    return scope.get("http_version") == "1.0" or "close" in Headers(scope=scope).get("connection", "").lower()


async def read_body(receive: Receive, limit: asyncio.Timeout) -> bytes:
    """The whole body. Raises TimeoutError at the limit, and ClientGone when the client goes first."""
    chunks = []
    async with limit:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise errors.ClientGone
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(chunks)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the request body is larger than {max_bytes} bytes", code="body_too_large")


def _packed(encoding: str) -> RequestError:
    said = f"a body in {errors.clean(encoding[:64])!r} is not supported; send it without Content-Encoding"
    return RequestError(said, code="unsupported_encoding")
