"""The runner as the scheduler sees it: effects that ask something of the device go in, events come out.

What the device raises loses its cache, and with it every step in flight, but neither the lower tiers nor the engine. It
is kept until the step's turn comes, so that the steps before it bring what they gave.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from pagedjax.core.effects import CopyBlocks, Discard, Effect, Fetch, SwapOut
from pagedjax.core.events import StepFailed, TransferDone
from pagedjax.core.plan import StepPlan
from pagedjax.engine.metrics import EngineMetrics
from pagedjax.engine.outputs import EngineError
from pagedjax.runtime.results import StepHandle, StepResult
from pagedjax.runtime.runner import Runner

logger = logging.getLogger(__name__)

# Requests that make their steps fail are found one by one. So many failures without a step between are the device's.
MAX_FAILURES_IN_A_ROW = 16


class Device:
    """Mutable; belongs to the engine's thread."""

    def __init__(self, runner: Runner, metrics: EngineMetrics, now_us: Callable[[], int]) -> None:
        self._runner, self._metrics, self._now_us = runner, metrics, now_us
        self._in_flight: deque[tuple[StepPlan, StepHandle | Exception]] = deque()
        self._lost: Exception | None = None
        self._is_deferred = False
        self._num_failures = 0

    @property
    def num_in_flight(self) -> int:
        """Steps that were started, or tried to, and have not been collected."""
        return len(self._in_flight)

    @property
    def deferred(self) -> StepPlan | None:
        """The newest step, while its sampling is still to be started with `sample`."""
        return self._in_flight[-1][0] if self._is_deferred else None

    def start(self, plan: StepPlan, *, defers_sampling: bool = False) -> None:
        """Start a step, or its forward pass alone. Raises nothing that the device raises."""
        started = time.perf_counter()
        handle = self._start(plan, defers_sampling)
        self._in_flight.append((plan, handle))
        self._is_deferred = defers_sampling and not isinstance(handle, Exception)
        self._metrics.step_time["dispatch"].inc(time.perf_counter() - started)

    def sample(self, masks: Mapping[int, np.ndarray]) -> None:
        """Start the sampling of the deferred step. `masks` are the rows that are not free, see `Runner.sample`."""
        plan, handle = self._in_flight.pop()
        assert self._is_deferred and not isinstance(handle, Exception)
        self._is_deferred = False
        started = time.perf_counter()
        try:
            handle = self._runner.sample(handle, masks)
        except Exception as error:
            self._lost = handle = error
        self._in_flight.append((plan, handle))
        self._metrics.step_time["dispatch"].inc(time.perf_counter() - started)

    def carry_out(self, effect: Effect) -> None:
        """Start what the effect asks of the device, if it asks anything. Raises nothing that the device raises."""
        match effect:
            case CopyBlocks():
                self._copy(effect)
            case SwapOut():
                self._runner.swap_out(effect)
            case Fetch():
                self._runner.fetch(effect)
            case Discard():
                self._runner.discard(effect)
            case _:
                pass

    def collect(self) -> StepResult | Exception:
        """Wait for the oldest step in flight: what it gave, or what the device raised."""
        _, handle = self._in_flight[0]
        if isinstance(handle, Exception):
            return handle
        try:
            result = self._runner.collect(handle)
        except Exception as error:
            return error
        self._in_flight.popleft()
        self._num_failures = 0
        return result

    def fail(self, error: Exception) -> StepFailed:
        """Start over with an empty cache: no step is in flight any more.

        Raises EngineError when the device fails time after time.
        """
        plan = self._in_flight[0][0]
        self._in_flight.clear()
        self._is_deferred = False
        self._lost = None
        self._num_failures += 1
        self._metrics.step_failures.inc()
        logger.error("event=step_failed plan=%d rows=%d error=%r", plan.plan_id, len(plan.rows), error)
        if self._num_failures > MAX_FAILURES_IN_A_ROW:
            raise EngineError(f"{self._num_failures} steps in a row failed, the last one with {error!r}") from error
        self._runner.reset()
        return StepFailed(plan.plan_id, (), self._now_us())

    def ended_transfers(self, timeout_s: float = 0.0) -> list[TransferDone]:
        """Transfers that have ended; while there is none but some are under way, waits at most `timeout_s` for one."""
        events = []
        for ended in self._runner.poll_transfers(timeout_s):
            way = ended.tier, "in" if ended.is_fetch else "out"
            if ended.error is None:
                self._metrics.swap_bytes.labels(*way).inc(ended.num_bytes)
            else:
                self._metrics.swap_failures.labels(*way).inc()
                logger.warning("event=swap_failed tier=%s direction=%s error=%s", *way, ended.error)
            if not ended.is_fetch:
                self._metrics.state_save_time.observe(ended.duration_s)
            events.append(TransferDone(ended.transfer_id, ended.ok, self._now_us()))
        return events

    def _start(self, plan: StepPlan, defers_sampling: bool) -> StepHandle | Exception:
        if self._lost is None:
            try:
                return (
                    self._runner.dispatch(plan, defers_sampling=True)
                    if defers_sampling
                    else self._runner.dispatch(plan)
                )
            except Exception as error:
                self._lost = error
        else:
            for scatter in plan.scatters:
                self._runner.discard(Discard(scatter.transfer_id))
        return self._lost

    def _copy(self, effect: CopyBlocks) -> None:
        try:
            self._runner.copy_blocks(effect)
        except Exception as error:
            self._lost = self._lost or error
