"""What a caller holds of a request that runs: its deltas as they come."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

import numpy as np

from pagedjax.engine.outputs import Delta, TokenLogprobs, Update
from pagedjax.engine.submission import Submission


class Stream:
    """The `n` sequences of one request as they grow: an async iterator of Delta, over when all have finished.

    Iteration raises EngineError for our own faults. `num_cached_tokens` and `prompt_logprobs` are complete once the
    first delta is out. Belongs to one event loop.
    """

    def __init__(self, request: Submission, abort: Callable[["Stream", str], None]) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.embedding: np.ndarray | None = None
        self.has_begun = False
        self._abort = abort
        self._num_unfinished = request.params.n
        self._deltas: deque[Delta] = deque()
        self._error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._num_unfinished == 0:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._deltas.popleft()

    def abort(self, outcome: str = "abort") -> None:
        """Stop generating; harmless when it has ended. Iteration ends without an error.

        `outcome` is what the metrics call it: abort or timeout."""
        if self._num_unfinished and self._error is None:
            self._num_unfinished = 0
            self._wake()
            self._abort(self, outcome)

    def feed(self, update: Update) -> bool:
        """Take in what a step brought (once ended, nothing); says whether the stream has ended by it.

        Called by the engine, on the stream's event loop.
        """
        if self.ended:
            return False
        if update.error is not None:
            self._error = update.error
        elif update.delta is not None:
            self.num_cached_tokens = update.num_cached_tokens
            # From another process they come once.
            self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs
            self.embedding = update.embedding
            self._num_unfinished -= update.delta.finish_reason is not None
            self._deltas.append(update.delta)
        self.has_begun = True
        self._wake()
        return self.ended

    @property
    def ended(self) -> bool:
        return self._num_unfinished == 0 or self._error is not None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def feed_all(fed: Iterable[tuple[Stream, Update]]) -> list[Stream]:
    """Feed streams what a step brought; gives those that have ended by it.

    Those that get their first token are woken before the others: all that is done for these would be added to the time
    that shows most.
    """
    begun_last = sorted(fed, key=lambda pair: pair[0].has_begun)
    return [stream for stream, update in begun_last if stream.feed(update)]
