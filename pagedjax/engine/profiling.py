"""JAX's profile of a running engine, for some seconds and beside its steps; one at a time."""

import logging
import threading
from collections.abc import Callable

import jax

from pagedjax.core.errors import RequestError
from pagedjax.engine.outputs import EngineError

logger = logging.getLogger(__name__)


class Profiler:
    """Thread-safe. `start` (with the directory) and `stop` are the profiler's own."""

    def __init__(
        self,
        start: Callable[[str], object] = jax.profiler.start_trace,
        stop: Callable[[], object] = jax.profiler.stop_trace,
    ) -> None:
        self._start, self._stop = start, stop
        self._running = threading.Lock()
        self._failure: Exception | None = None

    def begin(self, directory: str, duration_s: float) -> None:
        """Profile from now on for `duration_s` into a new place below `directory`, which is made if it is not there.

        Returns at once; a thread waits for the end, whatever becomes of whoever asked. Raises RequestError while
        another profile is taken.
        """
        if not self._running.acquire(blocking=False):
            raise RequestError("another profile is being taken; try again when it is done", code="profile_running")
        self._failure = None
        threading.Thread(target=self._take, args=(directory, duration_s), name="profile", daemon=True).start()

    def is_done(self) -> bool:
        """Whether the latest profile is written. Raises EngineError where it could not be taken."""
        if self._running.locked():
            return False
        if self._failure is not None:
            raise EngineError(f"the profile could not be taken: {self._failure}")
        return True

    def _take(self, directory: str, duration_s: float) -> None:
        try:
            self._start(directory)
            threading.Event().wait(duration_s)
            self._stop()
            logger.info("event=profile_written directory=%s seconds=%g", directory, duration_s)
        except Exception as error:
            logger.exception("event=profile_failed")
            self._failure = error
        finally:
            self._running.release()
