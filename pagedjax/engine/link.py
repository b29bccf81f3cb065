"""The way from asyncio to the step loop: what both ways have in common, and the one to a thread of this process."""

import asyncio
import faulthandler
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from pagedjax.core.config import SchedulerConfig
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.messages import Command, Report
from pagedjax.engine.step_loop import StepLoop
from pagedjax.engine.submission import Submission
from pagedjax.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0

T = TypeVar("T")
Build = Callable[[EngineConfig], "Engine"]
Hear = Callable[[Report], None]


class Facts(NamedTuple):
    """What a loaded engine tells of itself once."""

    scheduler: SchedulerConfig
    tokenizer: Tokenizer


class Link(Protocol):
    """Methods belong to the event loop, but for `finish_preparing`."""

    async def start(self, hear: Hear) -> Facts:
        """Load the engine; from then on `hear` gets its reports, on the event loop. Raises what loading raises."""
        ...

    def send(self, command: Command) -> None: ...

    def finish_preparing(self, request: Submission) -> Submission:
        """The part of preparing that is done where the engine is. Safe on any thread. Raises RequestError."""
        ...

    async def ask(self, question: "Callable[[Engine], T]") -> T:
        """What a function that can be imported says of the engine, where that is, beside its steps."""
        ...

    def dump_stacks(self) -> None:
        """Write to standard error where every thread beside the steps' stands, and theirs."""
        ...

    def is_alive(self) -> bool: ...

    async def stop(self) -> None: ...


class ThreadLink:
    """To a thread of this process, which has the engine to itself once it runs."""

    def __init__(self, config: EngineConfig, build: Build) -> None:
        self._config, self._build = config, build
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._steps: StepLoop | None = None

    @property
    def engine(self) -> "Engine | None":
        """None until it is loaded."""
        return None if self._steps is None else self._steps.engine

    async def start(self, hear: Hear) -> Facts:
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[Facts] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready, hear), name="engine", daemon=True)
        self._thread.start()
        return await ready

    def send(self, command: Command) -> None:
        assert self._steps is not None
        self._steps.put(command)

    def finish_preparing(self, request: Submission) -> Submission:
        assert self._steps is not None
        return self._steps.engine.with_grammar(request)

    async def ask(self, question: "Callable[[Engine], T]") -> T:
        assert self._steps is not None
        return question(self._steps.engine)

    def dump_stacks(self) -> None:
        faulthandler.dump_traceback()

    def is_alive(self) -> bool:
        return self._thread is None or self._thread.is_alive()

    async def stop(self) -> None:
        """End the thread, unless its step hangs: a device cannot be interrupted."""
        if self._steps is not None:
            self._steps.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("event=engine_left_behind waited_s=%g", STOP_TIMEOUT_S)

    def _run(self, ready: "asyncio.Future[Facts]", hear: Hear) -> None:
        assert self._loop is not None
        loop = self._loop
        try:
            engine = self._build(self._config)
        except BaseException as failure:
            call_on(loop, settle, ready, failure)
            return
        self._steps = StepLoop(engine, lambda report: call_on(loop, hear, report))
        call_on(loop, settle, ready, Facts(engine.state.config, engine.tokenizer))
        self._steps.run()


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Run `function` on the event loop, unless that is gone."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        logger.warning("event=event_loop_closed")


def settle(future: "asyncio.Future[Any]", outcome: object) -> None:
    """Give a future its value, or raise in whoever awaits it; nobody may do so any more."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
