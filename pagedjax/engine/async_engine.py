"""The engine for asyncio: streams on this side, the step loop on the other, messages between them.

The step loop has a thread of this process or a process of its own (`link.py`, `process_link.py`); callers cannot tell.
What a step brought comes back in one message, however many streams it feeds.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import generate_latest

from pagedjax.core.errors import RequestError
from pagedjax.core.request import SamplingParams
from pagedjax.core.state import State
from pagedjax.core.tenants import DEFAULT_TENANT
from pagedjax.engine import logs
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.link import Build, Facts, Link, ThreadLink
from pagedjax.engine.load import Admission, Load
from pagedjax.engine.messages import Abort, Add, CountRefused, Dropped, Failed, Report, Stepped
from pagedjax.engine.outputs import EngineError, Update
from pagedjax.engine.process_link import ProcessLink
from pagedjax.engine.stream import Stream, feed_all
from pagedjax.engine.submission import Pooling, Submission, submission
from pagedjax.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine
    from pagedjax.engine.lives import LifeStory
    from pagedjax.engine.metrics import EngineMetrics
    from pagedjax.engine.step_history import StepRecord

T = TypeVar("T")
PROFILE_POLL_S = 0.2


class AsyncEngine:
    """A running engine for asyncio callers. Methods without another note belong to the event loop that started it.

    With `own_process` the model is loaded and the steps run in a spawned process, where `build` must be importable.
    """

    def __init__(self, config: EngineConfig, build: Build, *, own_process: bool = False) -> None:
        self.config = config
        self.created = int(time.time())
        self._link: Link = ProcessLink(config, build) if own_process else ThreadLink(config, build)
        self._facts: Facts | None = None
        self._admission: Admission | None = None
        self._streams: dict[str, Stream] = {}
        self._draining = False
        self._failure: str | None = None
        self._last_progress_s = time.monotonic()

    @classmethod
    def from_config(cls, config: EngineConfig, *, own_process: bool = False) -> "AsyncEngine":
        """An engine that loads its model when started, with bars on standard error."""
        return cls(config, _build_showing_progress, own_process=own_process)

    async def start(self) -> None:
        """Load the model, compile, and begin to serve; returns when ready. Raises ConfigError."""
        try:
            facts = await self._link.start(self._hear)
        except BaseException as failure:
            self._failure = str(failure) or repr(failure)
            raise
        self._admission = Admission(facts.scheduler)
        self._facts = facts

    async def stop(self) -> None:
        """End what still runs with an error, and the step loop; one whose step hangs is killed if it is a process, and
        left behind if it is a thread, since a device cannot be interrupted."""
        self.drain()
        for stream in list(self._streams.values()):
            stream.feed(Update(stream.request_id, None, error=EngineError("the server is shutting down")))
            self._drop(stream, "abort")
        await self._link.stop()

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
        facts, _ = self._open()
        request = submission(
            facts.tokenizer,
            facts.scheduler,
            prompt,
            params,
            request_id=request_id or f"req-{uuid.uuid4().hex}",
            priority=priority,
            tenant=tenant,
            preemptible=preemptible,
            cache_salt=cache_salt,
            pooling=pooling,
        )
        return self._link.finish_preparing(request)

    def submit(
        self, prompt: str | list[int], params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> Stream:
        """Queue a request. Raises RequestError at once for what can never run, a full queue, or while draining."""
        (stream,) = self.submit_all([self.prepare(prompt, params, request_id=request_id, priority=priority)])
        return stream

    def submit_all(self, requests: Sequence[Submission]) -> list[Stream]:
        """Queue requests that were prepared: a stream each, or RequestError and none."""
        _, admission = self._open()
        used = next((request.request_id for request in requests if request.request_id in self._streams), None)
        if used is not None:
            raise RequestError(f"request id {used!r} is in use", param="request_id")
        refused = admission.refused(requests)
        if refused is not None:
            tenant, error = refused
            self._link.send(CountRefused(tenant))
            raise error
        if not self._streams:
            self._last_progress_s = time.monotonic()  # idleness was no standstill
        return [self._queue(request, admission) for request in requests]

    def drain(self) -> None:
        """Refuse new requests from now on; those here go on."""
        self._draining = True

    def is_ready(self) -> bool:
        """Whether a new request would be taken: not while it loads, drains, is broken, or its line is full."""
        is_open = self._facts is not None and not self._draining and self._failure is None
        return is_open and not self.is_full()

    def is_full(self) -> bool:
        """Whether the line has no room for a new request. A broken engine has no line any more."""
        return self._admission is not None and self._failure is None and self._admission.load.is_full

    def is_alive(self) -> bool:
        """Whether the step loop lives, or has not begun. Whether it moves tells `step_age_s`."""
        return self._failure is None and self._link.is_alive()

    def step_age_s(self) -> float:
        """Seconds since the last step while there is work; 0 without any, and while the model loads."""
        has_work = self._facts is not None and self._failure is None and bool(self._streams)
        return time.monotonic() - self._last_progress_s if has_work else 0.0

    @property
    def model_name(self) -> str:
        return self.config.name

    @property
    def max_model_len(self) -> int:
        return self._loaded().scheduler.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded().tokenizer

    def load(self) -> Load:
        """How many wait and run, as of the latest step; what is on its way there counts as waiting."""
        self._loaded()
        assert self._admission is not None
        return self._admission.load

    async def ask(self, question: Callable[[State], T]) -> T:
        """What a function that can be imported says of the scheduler's latest state; it runs where that is."""
        self._loaded()
        return await self._link.ask(partial(_of_state, question))

    async def lives(self, request_id: str) -> "list[LifeStory]":
        """What is remembered of a request, or of each of its prompts; nothing of one that is unknown or long gone."""
        self._loaded()
        return await self._link.ask(partial(_lives, request_id))

    async def steps(self, since: int, limit: int) -> "list[StepRecord]":
        """The latest steps with a number above `since`, at most `limit`, oldest first."""
        self._loaded()
        return await self._link.ask(partial(_steps, since, limit))

    async def profile(self, directory: str, duration_s: float) -> None:
        """Have JAX profile the engine into `directory`, where it runs; returns when that is written. It goes on if the
        caller is cancelled. Raises RequestError while another is taken, EngineError for one that fails."""
        self._loaded()
        await self._link.ask(partial(_begin_profile, directory, duration_s))
        while not await self._link.ask(_is_profile_done):
            await asyncio.sleep(PROFILE_POLL_S)

    async def render_metrics(self) -> bytes:
        """The engine's series in Prometheus' text format."""
        self._loaded()
        return await self._link.ask(_rendered)

    async def set_log_level(self, level: str) -> None:
        """Log from this level on, wherever the engine runs."""
        logs.set_level(level)
        if self._facts is not None:
            await self._link.ask(partial(_set_level, level))

    def dump_stacks(self) -> None:
        """Write to standard error where every thread of the engine's process stands, to see why a step hangs."""
        self._link.dump_stacks()

    @property
    def metrics(self) -> "EngineMetrics":
        """Those of an engine in this process; else see `render_metrics`."""
        return self._here().metrics

    def state(self) -> State:
        """The scheduler's latest state: a value, safe to look at on any thread. Of an engine in this process; else see
        `ask`."""
        return self._here().state

    def _open(self) -> tuple[Facts, Admission]:
        if self._failure is not None:
            raise EngineError(f"the engine has stopped: {self._failure}")
        facts = self._loaded()
        if self._draining:
            raise RequestError("the server is shutting down", code="draining")
        assert self._admission is not None
        return facts, self._admission

    def _loaded(self) -> Facts:
        """To look at: what has failed still shows its state and metrics."""
        if self._facts is None:
            raise RequestError("the model is still loading", code="not_ready")
        return self._facts

    def _here(self) -> "Engine":
        self._loaded()
        if not isinstance(self._link, ThreadLink) or self._link.engine is None:
            raise EngineError("the engine runs in a process of its own: use ask and render_metrics")
        return self._link.engine

    def _queue(self, request: Submission, admission: Admission) -> Stream:
        stream = self._streams[request.request_id] = Stream(request, self._drop)
        admission.sent(request)
        self._link.send(Add(request))
        return stream

    def _drop(self, stream: Stream, outcome: str) -> None:
        """Its id stays in use until the engine knows, so that no other stream gets what is still on its way."""
        self._link.send(Abort(stream.request_id, outcome))

    def _hear(self, report: Report) -> None:
        match report:
            case Stepped(updates, taken_ids, load):
                self._last_progress_s = time.monotonic()
                assert self._admission is not None
                self._admission.arrived(taken_ids, load)
                self._deliver(updates)
            case Dropped(request_id):
                self._streams.pop(request_id, None)
            case Failed(reason):
                self._fail(reason)

    def _deliver(self, updates: list[Update]) -> None:
        streams = self._streams
        for ended in feed_all([(streams[u.request_id], u) for u in updates if u.request_id in streams]):
            del streams[ended.request_id]

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        for stream in list(self._streams.values()):
            stream.feed(Update(stream.request_id, None, error=EngineError(f"the engine failed: {reason}")))
        self._streams.clear()


def _build_showing_progress(config: EngineConfig) -> "Engine":
    # With JAX: beside an engine in a process of its own, this one has no use for it.
    from pagedjax.engine.build import build_engine
    from pagedjax.weights.store import ProgressBar

    with ProgressBar(config.name) as bar:
        return build_engine(config, bar)


def _of_state(question: Callable[[State], T], engine: "Engine") -> T:
    return question(engine.state)


def _lives(request_id: str, engine: "Engine") -> "list[LifeStory]":
    return engine.lives.find(request_id)


def _steps(since: int, limit: int, engine: "Engine") -> "list[StepRecord]":
    return engine.steps.since(since, limit)


def _begin_profile(directory: str, duration_s: float, engine: "Engine") -> None:
    engine.profiler.begin(directory, duration_s)


def _is_profile_done(engine: "Engine") -> bool:
    return engine.profiler.is_done()


def _rendered(engine: "Engine") -> bytes:
    return generate_latest(engine.metrics.registry)


def _set_level(level: str, _engine: "Engine") -> None:
    logs.set_level(level)
