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
# Bodies on their way through the lanes; beyond it clients are asked to come back.
MAX_HELD_BYTES = 128 * 2**20

T = TypeVar("T")


class Workers:
    """The two lanes. Belongs to the event loop; the work itself must not touch it."""

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(2, "quick")
        self._slow = ThreadPoolExecutor(1, "slow")
        self._num_held_bytes = 0

    async def read(self, num_bytes: int, work: Callable[[], T]) -> T:
        """`work` on a request's body. Raises RequestError queue_full when too many bytes are being read already."""
        if self._num_held_bytes + num_bytes > max(MAX_HELD_BYTES, num_bytes):
            raise RequestError(
                f"{self._num_held_bytes} bytes of other requests are being read; try again", code="queue_full"
            )
        self._num_held_bytes += num_bytes
        try:
            return await self.run(num_bytes, work)
        finally:
            self._num_held_bytes -= num_bytes

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """`work`, by how much it has to do."""
        if num_bytes <= MAX_INLINE_BYTES:
            return work()
        lane = self._quick if num_bytes <= MAX_QUICK_BYTES else self._slow
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def stop(self) -> None:
        """Give up what has not begun."""
        for lane in (self._quick, self._slow):
            lane.shutdown(wait=False, cancel_futures=True)
