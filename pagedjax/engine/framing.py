"""Messages of bytes over a socket between two processes: one end waits for them on threads, the other has an event
loop, which is woken once a piece, of one message or several, and needs no thread for it.

Each message comes behind its length. Both ends are one program of one start, and nobody else has the socket.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18

Take = Callable[[bytes], None]
Lose = Callable[[], None]


class Inbox:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The messages that are complete with this piece."""
        self._rest += piece
        messages, begin = [], 0
        while (body := begin + _LENGTH.size) <= len(self._rest):
            end = body + _LENGTH.unpack_from(self._rest, begin)[0]
            if end > len(self._rest):
                break
            messages.append(bytes(self._rest[body:end]))
            begin = end
        del self._rest[:begin]
        return messages


class WaitingEnd:
    """For threads: one may send while another receives. Raises OSError once the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._inbox = connection, Inbox()

    def send(self, message: bytes) -> None:
        """Waits while the socket is full."""
        self._socket.sendall(_framed(message))

    def receive(self) -> list[bytes]:
        """Waits for messages; none at the end of all."""
        while piece := self._socket.recv(_READ_BYTES):
            if messages := self._inbox.feed(piece):
                return messages
        return []


class LoopEnd(asyncio.Protocol):
    """For an event loop: `take` gets each message until this end is closed, by `take` itself too; `lose` is called
    once, when the other end is gone or this one was closed."""

    def __init__(self, take: Take, lose: Lose) -> None:
        self._take, self._lose = take, lose
        self._inbox = Inbox()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, connection: socket.socket, take: Take, lose: Lose) -> "LoopEnd":
        """Over a socket, which is its own from then on."""
        loop = asyncio.get_running_loop()
        _, end = await loop.connect_accepted_socket(lambda: cls(take, lose), connection)
        return end

    def send(self, message: bytes) -> None:
        """Never waits: what the socket does not take yet is kept."""
        assert self._transport is not None
        self._transport.write(_framed(message))

    def close(self) -> None:
        """At once: what was not sent is forgotten."""
        assert self._transport is not None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        for message in self._inbox.feed(data):
            if self._transport.is_closing():
                return
            self._take(message)

    def connection_lost(self, _error: Exception | None) -> None:
        self._lose()


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message
