"""Threads for work that would hold up the event loop: reading large requests, rendering large answers.

What is small is done at once, on the loop: a hop to a thread costs more. The rest goes to one of two lanes, so that
somebody's megabytes, which take a second to tokenise, never stand before another's few pages.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pagedjax.core.errors import RequestError

# Parsing and tokenising this many bytes takes about a millisecond.
MAX_INLINE_BYTES = 4 * 2**10
# What needs more than about 50 ms goes to the slow lane.
MAX_QUICK_BYTES = 128 * 2**10
# Bodies in a lane; beyond it clients are asked to come back.
MAX_HELD_BYTES = 128 * 2**20

T = TypeVar("T")


class Workers:
    """The two lanes. Belongs to the event loop; the work itself must not touch it."""

    def __init__(self) -> None:
        self._quick, self._slow = _Lane(2, "quick"), _Lane(1, "slow")

    async def read(self, num_bytes: int, work: Callable[[], T]) -> T:
        """`work` on a request's body. Raises RequestError queue_full where too many wait for it already."""
        lane = self._lane(num_bytes)
        if lane is None:
            return work()
        if lane.num_bytes + num_bytes > max(MAX_HELD_BYTES, num_bytes):
            message = f"{lane.num_bytes} bytes of other large requests are to be read before yours; try again"
            raise RequestError(message, code="queue_full")
        return await lane.run(num_bytes, work)

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """`work` that is due in any case, such as an answer."""
        lane = self._lane(num_bytes)
        return work() if lane is None else await lane.run(num_bytes, work)

    def stop(self) -> None:
        """Give up what has not begun."""
        for lane in (self._quick, self._slow):
            lane.threads.shutdown(wait=False, cancel_futures=True)

    def _lane(self, num_bytes: int) -> "_Lane | None":
        if num_bytes <= MAX_INLINE_BYTES:
            return None
        return self._quick if num_bytes <= MAX_QUICK_BYTES else self._slow


class _Lane:
    def __init__(self, num_threads: int, name: str) -> None:
        self.threads = ThreadPoolExecutor(num_threads, name)
        self.num_bytes = 0

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        self.num_bytes += num_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, work)
        finally:
            self.num_bytes -= num_bytes
