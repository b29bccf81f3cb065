"""The generating requests that are being answered: who they are, and how each ends before its time.

A request ends early when its client goes, when its time is up, or when somebody ends it: at shutdown, by its id.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive

from serving import errors


@dataclass(slots=True, eq=False)
class Active:
    """A request that is being answered, within `timeout_s` of `began_s` if there is a limit. `charge` is told at the
    end how many tokens were generated."""

    id: str
    tenant: str
    route: str
    num_prompt_tokens: int = 0
    num_sequences: int = 1
    charge: Callable[[int], None] = lambda num_tokens: None
    num_output_tokens: int = 0
    began_s: float = field(default_factory=time.monotonic)
    timeout_s: float | None = None


class ActiveRequests:
    """The generating requests that have not been answered yet."""

    def __init__(self) -> None:
        self._active: dict[str, tuple[Active, Callable[[Exception], None]]] = {}
        self._num_sequences: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._active)

    def num_sequences(self, tenant: str) -> int:
        return self._num_sequences[tenant]

    def interrupt_all(self, error: Exception) -> None:
        """Ends every one of them with this error."""
        for _, interrupt in tuple(self._active.values()):
            interrupt(error)

    def cancel(self, request_id: str, tenant: str | None = None) -> bool:
        """End one with an error, if there is such a one, of this tenant if one is named."""
        active, interrupt = self._active.get(request_id, (None, None))
        if active is None or interrupt is None or tenant not in (None, active.tenant):
            return False
        interrupt(errors.cancelled())
        return True

    def listing(self) -> list[dict[str, Any]]:
        """What is known of each, oldest first; no texts."""
        now_s = time.monotonic()
        return [
            {
                "id": one.id,
                "tenant": one.tenant,
                "route": one.route,
                "age_s": round(now_s - one.began_s, 3),
                "prompt_tokens": one.num_prompt_tokens,
                "output_tokens": one.num_output_tokens,
            }
            for one, _ in self._active.values()
        ]

    async def run(self, active: Active, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """`work`, until the client goes (ClientGone), its time is up or somebody ends it (with an error)."""
        loop = asyncio.get_running_loop()
        interrupted: asyncio.Future[Exception] = loop.create_future()

        def interrupt(error: Exception) -> None:
            if not interrupted.done():
                interrupted.set_result(error)

        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_until_disconnect(receive))
        timer = None
        if active.timeout_s is not None:
            left_s = active.began_s + active.timeout_s - time.monotonic()
            timer = loop.call_later(max(left_s, 0), interrupt, errors.deadline_exceeded(active.timeout_s))
        self._active[active.id] = active, interrupt
        self._num_sequences[active.tenant] += active.num_sequences
        try:
            await asyncio.wait((working, watching, interrupted), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise interrupted.result() if interrupted.done() else errors.ClientGone
            working.result()
        finally:
            del self._active[active.id]
            self._num_sequences[active.tenant] -= active.num_sequences
            if not self._num_sequences[active.tenant]:
                del self._num_sequences[active.tenant]
            if timer is not None:
                timer.cancel()
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
