"""A tiny HTTP server for tests: answers each path as it is told, byte for byte."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[["Connection"], Awaitable[None]]


@dataclass
class Connection:
    """One request as received, and the way back."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    async def head(self, status: int = 200, content_type: str = "text/event-stream") -> None:
        await self.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )

    async def piece(self, data: bytes) -> None:
        """One HTTP chunk."""
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@dataclass
class Server:
    """Serves while it is entered; `url` is its address, `seen` what came in."""

    answers: dict[str, Answer]
    seen: list[Connection] = field(default_factory=list)
    url: str = ""
    _handlers: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> "Server":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        # Before Python 3.12 `wait_closed` leaves answers to clients that have gone to the collector.
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handlers.append(asyncio.create_task(self._handle(reader, writer)))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            connection = Connection(lines[0].split()[1], headers, json.loads(body or b"{}"), writer)
            self.seen.append(connection)
            await self.answers[connection.path](connection)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def event(text: str = "", *, finish: str | None = None, **fields: Any) -> bytes:
    """A chunk of the completions API."""
    return sse({"choices": [{"index": 0, "text": text, "finish_reason": finish, **fields}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return sse({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}})


def sse(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def streaming(*pieces: bytes, gap_s: float = 0.0) -> Answer:
    """Answer with these HTTP chunks, `gap_s` apart."""

    async def answer(connection: Connection) -> None:
        await connection.head()
        for piece in pieces:
            await connection.piece(piece)
            await asyncio.sleep(gap_s)
        await connection.end()

    return answer


def failing(status: int, body: bytes) -> Answer:
    async def answer(connection: Connection) -> None:
        await connection.head(status, "application/json")
        await connection.piece(body)
        await connection.end()

    return answer
