"""What the event loop sends gathers for a few of its turns, so that requests which come together begin together.

A first step is planned of what is there, and the second one right behind it: of a burst's first request alone, both
would be short, and all others would wait for them. While turns bring more, the loop is busy reading a burst. Idle turns
take some 10 us each; busy ones take as long as all that is ready, so that time bounds the wait too.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# A request takes some turns from its connection to here.
QUIET_TURNS = 4
MAX_GATHERED = 8
MAX_WAIT_S = 0.001


class Outbox(Generic[T]):
    """`send` gets what has gathered, at the latest when the turn ends in which `MAX_WAIT_S` have passed by `clock`
    since the first of it. (uvloop's own clock has whole milliseconds only.) Belongs to one event loop."""

    def __init__(self, send: Callable[[list[T]], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._clock = send, clock
        self._gathered: list[T] = []
        self._deadline_s = 0.0

    def put(self, message: T) -> None:
        self._gathered.append(message)
        if len(self._gathered) == 1:
            self._deadline_s = self._clock() + MAX_WAIT_S
            asyncio.get_running_loop().call_soon(self._turn, 1, QUIET_TURNS)

    def _turn(self, num_known: int, num_quiet_left: int) -> None:
        num_gathered = len(self._gathered)
        left = num_quiet_left - 1 if num_gathered == num_known else QUIET_TURNS
        if left and num_gathered < MAX_GATHERED and self._clock() < self._deadline_s:
            asyncio.get_running_loop().call_soon(self._turn, num_gathered, left)
            return
        gathered, self._gathered = self._gathered, []
        self._send(gathered)
