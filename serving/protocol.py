"""uvicorn's HTTP protocol with bounds on what a request may send, and how long it may take, before it says anything.

httptools collects a header until it ends, however long it is (h11 has a bound of its own), and so it does with chunk
extensions and trailers; and nobody waits for ever for a client that sends a byte a minute, or none.
"""

import asyncio
from typing import Any

MAX_HEADER_BYTES = 64 * 2**10
HEADER_TIMEOUT_S = 30.0
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def bounded_protocol() -> type[asyncio.Protocol]:
    """The protocol class for uvicorn: over httptools, or h11 where that is missing."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol

    class BoundedProtocol(HttpToolsProtocol):
        """Closes a connection on which MAX_HEADER_BYTES came without the headers' end, or a byte of a body, among
        them, and one on which a request's headers take longer than HEADER_TIMEOUT_S. What arrives at once is parsed
        first, so headers somewhat larger may get through to the app. Between requests uvicorn's own limit holds.

        A connection that is lost ends all its requests: uvicorn tells only the latest, and of those that a client sends
        without waiting for an answer that is not the one which runs."""

        _num_idle_bytes = 0
        _open: tuple[Any, ...] = ()
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)
            for cycle in self._open:
                cycle.disconnected = cycle.disconnected or not cycle.response_complete
                cycle.message_event.set()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            self._num_idle_bytes += len(data)
            super().data_received(data)
            if self._num_idle_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_REFUSAL)
                self.transport.close()

        def on_headers_complete(self) -> None:
            self._stop_waiting()
            self._num_idle_bytes = 0
            super().on_headers_complete()
            begun = () if self.cycle in self._open or self.cycle is None else (self.cycle,)
            self._open = (*[cycle for cycle in self._open if not cycle.response_complete], *begun)

        def on_body(self, body: bytes) -> None:
            self._num_idle_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._num_idle_bytes = 0
            super().on_message_complete()

        def _wait_for_headers(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._end_slow)

        def _stop_waiting(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _end_slow(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_TOO_SLOW)
                self.transport.close()

    return BoundedProtocol


def header_bytes(scope: Any) -> int:
    """What a request's target and headers take."""
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope.get("raw_path") or b"") + len(scope["query_string"])
