"""uvicorn's HTTP protocol with a bound on what a request may send before it says anything.

httptools collects a header until it ends, however long it is (h11 has a bound of its own), and so it does with chunk
extensions and trailers.
"""

import asyncio
from typing import Any

MAX_HEADER_BYTES = 64 * 2**10
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def bounded_protocol() -> type[asyncio.Protocol]:
    """The protocol class for uvicorn: over httptools, or h11 where that is missing."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol

    class BoundedProtocol(HttpToolsProtocol):
        """Closes a connection on which MAX_HEADER_BYTES came without the headers' end, or a byte of a body, among
        them. What arrives at once is parsed first, so headers somewhat larger may get through to the app."""

        _num_idle_bytes = 0

        def data_received(self, data: bytes) -> None:
            self._num_idle_bytes += len(data)
            super().data_received(data)
            if self._num_idle_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_REFUSAL)
                self.transport.close()

        def on_headers_complete(self) -> None:
            self._num_idle_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._num_idle_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._num_idle_bytes = 0
            super().on_message_complete()

    return BoundedProtocol


def header_bytes(scope: Any) -> int:
    """What a request's target and headers take."""
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope.get("raw_path") or b"") + len(scope["query_string"])
