"""What the engine's own process runs: the step loop on its main thread, and a thread that takes in what comes.

It lives as long as the connection to its parent: when that ends, however the parent ended, this process ends at once,
in the middle of a step too. Signals are the parent's to judge.
"""

import ctypes
import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.engine import logs
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.framing import WaitingEnd
from pagedjax.engine.link import Build, Facts
from pagedjax.engine.messages import Abort, Add, Command, Refuse
from pagedjax.engine.outputs import EngineError
from pagedjax.engine.step_loop import StepLoop
from pagedjax.engine.submission import Submission
from pagedjax.engine.wire import (
    Answer,
    Ask,
    DumpStacks,
    FromEngine,
    NotStarted,
    Packer,
    Ready,
    Stop,
    ToEngine,
    unpack_commands,
)

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main(connection: socket.socket, config: EngineConfig, build: Build, levels: Mapping[str, int]) -> NoReturn:
    """Load, serve and leave; never returns."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    logs.begin(levels)
    # By default bars share a semaphore between processes, of which nobody would be rid at our end.
    tqdm.set_lock(threading.RLock())
    office = Office(WaitingEnd(connection))
    threading.Thread(target=office.receive, name="intake", daemon=True).start()
    try:
        engine = build(config)
    except BaseException as failure:
        logger.debug("event=engine_not_built", exc_info=True)
        office.tell(NotStarted(_portable(failure)))
        leave(1)
    steps = StepLoop(engine, office.tell)
    office.open(steps)
    office.tell(Ready(Facts(engine.state.config, engine.tokenizer)))
    steps.run()
    # A loop that has failed still shows its state and its metrics, until it is told to end.
    office.ended.wait()
    leave(0)


class Office:
    """Where messages come and go. `tell` is for the main thread and the thread of `receive`."""

    def __init__(self, end: WaitingEnd) -> None:
        self.ended = threading.Event()
        self._end = end
        self._packer = Packer()
        self._sending = threading.Lock()
        self._steps: StepLoop | None = None
        self._compilers = ThreadPoolExecutor(2, "grammars")
        self._held: dict[str, Abort | None] = {}  # requests whose grammars are compiled, and whether they are dropped
        self._holding = threading.Lock()

    def open(self, steps: StepLoop) -> None:
        """From now on commands go to these steps."""
        self._steps = steps

    def tell(self, message: FromEngine) -> None:
        """Waits while the socket is full: steps go no faster than somebody takes what they bring."""
        with self._sending:
            try:
                self._end.send(self._packer.pack(message))
            except OSError:
                leave(1)

    def receive(self) -> None:
        """Take in what comes, until the connection ends; then this process does."""
        try:
            while pieces := self._end.receive():
                for piece in pieces:
                    for message in unpack_commands(piece):
                        self._take(message)
        except OSError:
            pass
        except BaseException:
            logger.exception("event=intake_failed")
        leave(1)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Stop):
            self.ended.set()
            if self._steps is None:
                leave(0)
            self._steps.put(None)
            return
        assert self._steps is not None
        match message:
            case DumpStacks():
                faulthandler.dump_traceback()
            case Ask():
                self.tell(answer(message, self._steps.engine))
            case Add(request) if request.params.structured_outputs is not None:
                with self._holding:
                    self._held[request.request_id] = None
                self._compilers.submit(self._compile, self._steps, request)
            case Abort() if self._is_held(message):
                pass
            case _:
                self._steps.put(message)

    def _is_held(self, abort: Abort) -> bool:
        """Whether it is about a request whose grammar is still compiled; it then waits for that."""
        with self._holding:
            if abort.request_id not in self._held:
                return False
            self._held[abort.request_id] = abort
            return True

    def _compile(self, steps: StepLoop, request: Submission) -> None:
        """Runs on a thread beside those that follow, so that nobody waits for another's grammar."""
        try:
            command: Command = Add(steps.engine.with_grammar(request))
        except Exception as error:
            command = Refuse(request.request_id, _portable(error))
        with self._holding:
            steps.put(command)
            abort = self._held.pop(request.request_id)
            if abort is not None:
                steps.put(abort)


def answer(ask: Ask, engine: "Engine") -> Answer:
    try:
        return Answer(ask.number, pickle.dumps(pickle.loads(ask.question)(engine)))
    except Exception as error:
        return Answer(ask.number, error=_portable(error))


def die_with_parent() -> None:
    """Have the kernel end this process with its parent, should even the thread that waits for that be stuck."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def leave(status: int) -> NoReturn:
    """End now, without what the interpreter and the compiling threads would still do."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


def _portable(error: BaseException) -> Exception:
    """An error that the other side can read: ours as they are, others by their text."""
    if isinstance(error, ConfigError | RequestError | EngineError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")
