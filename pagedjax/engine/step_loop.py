"""The step loop: commands come in from any thread, what each step brought goes out as reports.

It runs the same on a thread beside asyncio and in a process of its own; only the way there differs (`link.py`).
"""

import logging
import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagedjax.core.errors import RequestError
from pagedjax.engine.load import load_of
from pagedjax.engine.messages import Abort, Add, Command, CountRefused, Dropped, Failed, Refuse, Report, Stepped
from pagedjax.engine.outputs import Update
from pagedjax.engine.wake_soon import wake_soon

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine

logger = logging.getLogger(__name__)

# Steps that bring nothing (parts of long prompts, copies) are told as often as this, to show that they advance.
QUIET_REPORT_S = 0.5


class StepLoop:
    """`put` is safe on any thread; `run` owns the engine until it returns."""

    def __init__(self, engine: "Engine", tell: Callable[[Report], None]) -> None:
        self.engine = engine
        self._tell = tell
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._taken_ids: list[str] = []
        self._told_s = 0.0
        self._told_line: object = None
        self._told_running = -1

    def put(self, command: Command | None) -> None:
        """Have a command carried out between two steps; None ends the loop."""
        self._commands.put(command)

    def run(self) -> None:
        """Step until told to end. A failure that ends it is told, not raised."""
        wake_soon()
        try:
            while self._obey():
                self._report(self.engine.step())
        except BaseException as failure:
            logger.exception("event=engine_failed")
            self._tell(Failed(str(failure) or repr(failure)))

    def _obey(self) -> bool:
        """Carry out the commands that have come; wait for one if there is nothing else to do. False to end."""
        while True:
            try:
                command = self._commands.get(timeout=None if self.engine.is_idle else 0)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Add(request):
                self._taken_ids.append(request.request_id)
                try:
                    self.engine.add(request)
                except RequestError as error:
                    self._report([Update(request.request_id, None, error=error)])
            case Refuse(request_id, error):
                self._taken_ids.append(request_id)
                self._report([Update(request_id, None, error=error)])
            case Abort(request_id, outcome):
                self.engine.abort(request_id, outcome)
                # Another request may have the id from then on: what is to be said of this one goes first.
                self._report([])
                self._tell(Dropped(request_id))
            case CountRefused(tenant):
                self.engine.metrics.requests.labels("refused").inc()
                self.engine.metrics.tenants.count_refused(tenant)

    def _report(self, updates: list[Update]) -> None:
        state, now_s = self.engine.state, time.monotonic()
        is_same = state.waiting is self._told_line and len(state.running) == self._told_running
        is_quiet = not updates and is_same and not self._taken_ids
        if is_quiet and now_s - self._told_s < QUIET_REPORT_S:
            return
        self._told_s, self._told_line, self._told_running = now_s, state.waiting, len(state.running)
        taken_ids, self._taken_ids = self._taken_ids, []
        self._tell(Stepped(updates, taken_ids, None if is_same else load_of(state)))
