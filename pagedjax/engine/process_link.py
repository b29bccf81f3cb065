"""The way to a step loop in a process of its own, where a busy interpreter beside it cannot stretch its steps.

Commands that come together go over together (`outbox.py`); reports come back one a step. What waits to be sent is
bounded by `Admission`, which counts it as waiting in line; an event loop that does not take reports holds up the steps
once the socket is full.
"""

import asyncio
import logging
import multiprocessing
import pickle
import socket
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from pagedjax.engine import engine_process, logs
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.framing import LoopEnd
from pagedjax.engine.link import STOP_TIMEOUT_S, Build, Facts, Hear, settle
from pagedjax.engine.messages import Command, Failed
from pagedjax.engine.outbox import Outbox
from pagedjax.engine.outputs import EngineError
from pagedjax.engine.submission import Submission
from pagedjax.engine.wire import (
    Answer,
    Ask,
    DumpStacks,
    FromEngine,
    NotStarted,
    Ready,
    Stop,
    ToEngine,
    pack_commands,
    unpack,
)

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine

logger = logging.getLogger(__name__)

T = TypeVar("T")
# A process that has closed its socket is gone, or as good as.
_EXIT_TIMEOUT_S = 2.0


class ProcessLink:
    """To a spawned process. `build` must be importable there."""

    def __init__(self, config: EngineConfig, build: Build) -> None:
        self._config, self._build = config, build
        self._process: multiprocessing.process.BaseProcess | None = None
        self._end: LoopEnd | None = None
        self._outbox: Outbox[ToEngine] = Outbox(self._write)
        self._ready: asyncio.Future[Facts] | None = None
        # Only so that the task lives: the event loop alone would let it go.
        self._losing: asyncio.Task[None] | None = None
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._is_lost = False
        self._has_refused = False
        self._is_stopping = False

    @property
    def process_id(self) -> int | None:
        """None before it is started."""
        return None if self._process is None else self._process.pid

    async def start(self, hear: Hear) -> Facts:
        self._ready = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        try:
            # The engine's process has the only other end, so that its death is the end of the connection.
            with theirs:
                self._process = self._spawned(theirs)
            self._end = await LoopEnd.open(ours, lambda data: self._read(data, hear), lambda: self._begin_losing(hear))
            return await self._ready
        except BaseException:
            self._give_up(ours)
            raise

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    def finish_preparing(self, request: Submission) -> Submission:
        """Grammars are compiled there, once the request has arrived."""
        return request._replace(prompt=None)

    async def ask(self, question: "Callable[[Engine], T]") -> T:
        """Raises EngineError where there is nobody any more to answer."""
        if self._is_lost or self._is_stopping:
            raise EngineError("the engine's process has ended")
        ask = Ask(next(self._numbers), pickle.dumps(question))
        answer = self._questions[ask.number] = asyncio.get_running_loop().create_future()
        self._outbox.put(ask)
        try:
            value: T = pickle.loads(await answer)
        finally:
            self._questions.pop(ask.number, None)
        return value

    def dump_stacks(self) -> None:
        self._outbox.put(DumpStacks())

    def is_alive(self) -> bool:
        return not self._is_lost

    async def stop(self) -> None:
        """End the process; one whose step hangs is killed."""
        self._is_stopping = True
        if self._process is None or self._end is None:
            return
        self._outbox.put(Stop())
        await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        if self._process.is_alive():
            logger.warning("event=engine_killed waited_s=%g", STOP_TIMEOUT_S)
            self._process.kill()
            await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        self._end.close()

    def _spawned(self, connection: socket.socket) -> multiprocessing.process.BaseProcess:
        # Threads and devices do not survive a fork.
        context = multiprocessing.get_context("spawn")
        args = connection, self._config, self._build, logs.levels()
        process = context.Process(target=engine_process.main, args=args, name="pagedjax-engine", daemon=True)
        process.start()
        return process

    def _give_up(self, connection: socket.socket) -> None:
        """Leave nothing of a start that has come to nothing, however far it got."""
        assert self._ready is not None
        self._is_stopping = True
        self._ready.cancel()
        if self._process is not None:
            self._process.kill()
        if self._end is not None:
            self._end.close()
        connection.close()

    def _write(self, messages: list[ToEngine]) -> None:
        if not self._is_lost:
            assert self._end is not None
            self._end.send(pack_commands(messages))

    def _read(self, data: bytes, hear: Hear) -> None:
        """A report that cannot be taken in ends the connection, and with it the process and all requests: streams that
        lack some of their text must not end as if they were whole."""
        assert self._end is not None
        try:
            self._take(unpack(data), hear)
        except Exception:
            logger.exception("event=report_not_taken")
            self._end.close()

    def _take(self, message: FromEngine, hear: Hear) -> None:
        assert self._ready is not None
        match message:
            case Ready(facts):
                settle(self._ready, facts)
            case NotStarted(error):
                self._has_refused = True
                settle(self._ready, error)
            case Answer(number, value, error):
                answer = self._questions.get(number)
                if answer is not None:
                    settle(answer, value if error is None else error)
            case _:
                hear(message)

    def _begin_losing(self, hear: Hear) -> None:
        self._is_lost = True
        if self._is_stopping:
            self._lose(hear)
        else:
            self._losing = asyncio.ensure_future(self._lose_with_process(hear))

    async def _lose_with_process(self, hear: Hear) -> None:
        """It is ending, or has closed its socket in some other way and is of no use."""
        assert self._process is not None
        await asyncio.to_thread(self._process.join, _EXIT_TIMEOUT_S)
        self._lose(hear)

    def _lose(self, hear: Hear) -> None:
        assert self._process is not None and self._ready is not None
        error = EngineError(f"the engine's process has ended (exit code {self._process.exitcode})")
        if not self._is_stopping and not self._has_refused:
            logger.critical("event=engine_process_lost pid=%s exit_code=%s", self._process.pid, self._process.exitcode)
        settle(self._ready, error)
        for answer in self._questions.values():
            settle(answer, error)
        hear(Failed(str(error)))
