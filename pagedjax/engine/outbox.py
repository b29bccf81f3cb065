"""What the event loop sends gathers for a few of its turns, so that requests which come together begin together.

A first step is planned of what is there, and the second one right behind it: of a burst's first request alone, both
would be short, and all others would wait for them. While turns bring more, the loop is busy reading a burst; idle turns
take some 10 us each, so a request that comes alone does not wait.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# A request takes some turns from its connection to here.
QUIET_TURNS = 4
MAX_GATHERED = 8


class Outbox(Generic[T]):
    """`send` gets what has gathered. Belongs to one event loop."""

    def __init__(self, send: Callable[[list[T]], None]) -> None:
        self._send = send
        self._gathered: list[T] = []

    def put(self, message: T) -> None:
        self._gathered.append(message)
        if len(self._gathered) == 1:
            asyncio.get_running_loop().call_soon(self._turn, 1, QUIET_TURNS)

    def _turn(self, num_known: int, num_quiet_left: int) -> None:
        num_gathered = len(self._gathered)
        left = num_quiet_left - 1 if num_gathered == num_known else QUIET_TURNS
        if left and num_gathered < MAX_GATHERED:
            asyncio.get_running_loop().call_soon(self._turn, num_gathered, left)
            return
        gathered, self._gathered = self._gathered, []
        self._send(gathered)
