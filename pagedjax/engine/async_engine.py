"""The engine behind a thread: asyncio on one side, the step loop on the other, messages between them.

Only the engine's thread touches the Engine once it runs. Commands go to it through a queue; what a step brought comes
back in one hop a step, however many streams it feeds.
"""

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from pagedjax.core.errors import RequestError
from pagedjax.core.request import SamplingParams
from pagedjax.core.state import State
from pagedjax.core.tenants import DEFAULT_TENANT
from pagedjax.engine.build import build_engine
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.engine import Engine
from pagedjax.engine.metrics import EngineMetrics
from pagedjax.engine.outputs import Delta, EngineError, TokenLogprobs, Update
from pagedjax.engine.submission import Pooling, Submission
from pagedjax.engine.tokenizer import Tokenizer
from pagedjax.weights.store import ProgressBar

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0


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
            self.prompt_logprobs = update.prompt_logprobs
            self.embedding = update.embedding
            self._num_unfinished -= update.delta.finish_reason is not None
            self._deltas.append(update.delta)
        self._wake()
        return self.ended

    @property
    def ended(self) -> bool:
        return self._num_unfinished == 0 or self._error is not None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncEngine:
    """A running engine for asyncio callers. Methods without another note belong to the event loop that started it."""

    def __init__(self, config: EngineConfig, build: Callable[[EngineConfig], Engine]) -> None:
        self.config = config
        self.created = int(time.time())
        self._build = build
        self._engine: Engine | None = None
        self._streams: dict[str, Stream] = {}
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False
        self._failure: BaseException | None = None
        self._last_progress_s = time.monotonic()

    @classmethod
    def from_config(cls, config: EngineConfig) -> "AsyncEngine":
        """An engine that loads its model when started, with bars on standard error."""
        return cls(config, _build_showing_progress)

    async def start(self) -> None:
        """Load the model, compile, and begin to serve; returns when ready. Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        await ready

    async def stop(self) -> None:
        """End what still runs with an error, and the thread, unless its step hangs: a device cannot be interrupted."""
        self.drain()
        for stream in list(self._streams.values()):
            stream.feed(Update(stream.request_id, None, error=EngineError("the server is shutting down")))
            self._drop(stream, "abort")
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("event=engine_left_behind waited_s=%g", STOP_TIMEOUT_S)

    def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        preemptible: bool = True,
        cache_salt: str = "",
        pooling: Pooling | None = None,
    ) -> Submission:
        """Check and tokenise a request; safe on any thread. Raises RequestError."""
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        engine = self._ready_engine()
        return engine.prepare(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            preemptible=preemptible,
            cache_salt=cache_salt,
            pooling=pooling,
        )

    def submit(
        self, prompt: str | list[int], params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> Stream:
        """Queue a request. Raises RequestError at once for what can never run, a full queue, or while draining."""
        (stream,) = self.submit_all([self.prepare(prompt, params, request_id=request_id, priority=priority)])
        return stream

    def submit_all(self, requests: Sequence[Submission]) -> list[Stream]:
        """Queue requests that were prepared: a stream each, or RequestError and none."""
        engine = self._ready_engine()
        used = next((request.request_id for request in requests if request.request_id in self._streams), None)
        if used is not None:
            raise RequestError(f"request id {used!r} is in use", param="request_id")
        engine.check(requests)
        if not self._streams:
            self._last_progress_s = time.monotonic()  # idleness was no standstill
        return [self._queue(request) for request in requests]

    def drain(self) -> None:
        """Refuse new requests from now on; those here go on."""
        self._draining = True

    def is_ready(self) -> bool:
        """Whether a new request would be taken: not while it loads, drains, is broken, or its line is full."""
        is_open = self._engine is not None and not self._draining and self._failure is None
        return is_open and not self.is_full()

    def is_full(self) -> bool:
        """Whether the line has no room for a new request. A broken engine has no line any more."""
        if self._engine is None or self._failure is not None:
            return False
        waiting, limits = self._engine.state.waiting, self._engine.state.config
        return len(waiting) >= limits.max_queued_requests or waiting.num_tokens >= limits.max_queued_tokens

    def is_alive(self) -> bool:
        """Whether the step loop lives, or has not begun. Whether it moves tells `step_age_s`."""
        return self._failure is None and (self._thread is None or self._thread.is_alive())

    def step_age_s(self) -> float:
        """Seconds since the last step while there is work; 0 without any, and while the model loads."""
        has_work = self._engine is not None and self._failure is None and bool(self._streams)
        return time.monotonic() - self._last_progress_s if has_work else 0.0

    @property
    def model_name(self) -> str:
        return self.config.name

    @property
    def max_model_len(self) -> int:
        return self._loaded_engine().state.config.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded_engine().tokenizer

    @property
    def metrics(self) -> EngineMetrics:
        return self._loaded_engine().metrics

    def state(self) -> State:
        """The scheduler's latest state: a value, safe to look at on any thread."""
        return self._loaded_engine().state

    def _ready_engine(self) -> Engine:
        if self._failure is not None:
            raise EngineError(f"the engine has stopped: {self._failure}")
        engine = self._loaded_engine()
        if self._draining:
            raise RequestError("the server is shutting down", code="draining")
        return engine

    def _loaded_engine(self) -> Engine:
        """To look at: what has failed still shows its state and metrics."""
        if self._engine is None:
            raise RequestError("the model is still loading", code="not_ready")
        return self._engine

    def _queue(self, request: Submission) -> Stream:
        stream = self._streams[request.request_id] = Stream(request, self._drop)
        self._commands.put(lambda engine: self._add(engine, request))
        return stream

    def _drop(self, stream: Stream, outcome: str) -> None:
        """Its id stays in use until the engine knows, so that no other stream gets what is still on its way."""
        self._commands.put(lambda engine: self._abort(engine, stream.request_id, outcome))

    def _deliver(self, updates: list[Update]) -> None:
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is not None and stream.feed(update):
                del self._streams[update.request_id]

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def _fail(self, failure: BaseException) -> None:
        self._failure = failure
        for stream in list(self._streams.values()):
            stream.feed(Update(stream.request_id, None, error=EngineError(f"the engine failed: {failure}")))
        self._streams.clear()

    # From here on: the engine's thread.

    def _run(self, ready: "asyncio.Future[None]") -> None:
        try:
            engine = self._build(self.config)
        except BaseException as failure:
            self._failure = failure
            self._call(_settle, ready, failure)
            return
        self._engine = engine
        self._call(_settle, ready, None)
        try:
            while self._obey(engine):
                updates = engine.step()
                self._last_progress_s = time.monotonic()
                if updates:
                    self._call(self._deliver, updates)
        except BaseException as failure:
            logger.exception("event=engine_failed")
            self._call(self._fail, failure)

    def _obey(self, engine: Engine) -> bool:
        """Carry out the commands that have come; wait for one if there is nothing else to do. False to end."""
        while True:
            try:
                command = self._commands.get(timeout=None if engine.is_idle else 0)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._last_progress_s = time.monotonic()
            command(engine)

    def _add(self, engine: Engine, request: Submission) -> None:
        try:
            engine.add(request)
        except RequestError as error:
            self._call(self._deliver, [Update(request.request_id, None, error=error)])

    def _abort(self, engine: Engine, request_id: str, outcome: str) -> None:
        engine.abort(request_id, outcome)
        self._call(self._forget, request_id)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Run `function` on the event loop, unless that is gone."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.warning("event=event_loop_closed")


def _build_showing_progress(config: EngineConfig) -> Engine:
    with ProgressBar(config.name) as bar:
        return build_engine(config, bar)


def _settle(ready: "asyncio.Future[None]", failure: BaseException | None) -> None:
    if ready.done():
        return
    if failure is None:
        ready.set_result(None)
    else:
        ready.set_exception(failure)
