"""The engine's loop on a virtual clock: events go to `update`, a cost model answers its effects.

As in production a step is planned while the one before it runs, the host's time hides behind the device's, and steps
are planned only when one is done or nothing is in flight. Events come in order of time; at one instant finished
transfers before finished steps, and those before arrivals. Nothing is random, so equal inputs give equal reports.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import assert_never

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import CopyBlocks, Discard, Effect, Fetch, Finish, Preempt, Reject, RunStep, SwapOut
from pagedjax.core.errors import SchedulerError
from pagedjax.core.events import Arrived, Event, StepDone, StepDue, TransferDone
from pagedjax.core.plan import Row, RowResult, StepPlan, Tier
from pagedjax.core.request import FinishReason
from pagedjax.core.scheduler import init, update
from pagedjax.core.state import State
from pagedjax.simulator.cost import CostModel
from pagedjax.simulator.recorder import Recorder, Track
from pagedjax.simulator.report import SimReport, Transfer
from pagedjax.simulator.workload import SimRequest, unique_names

Observer = Callable[[State, Event, State, tuple[Effect, ...]], None]

_TRANSFER, _STEP, _ARRIVAL = range(3)


def simulate(
    config: SchedulerConfig,
    arrivals: Iterable[SimRequest],
    cost: CostModel,
    *,
    until_us: int | None = None,
    observe: Observer | None = None,
) -> SimReport:
    """Run the scheduler on `arrivals` until nobody is left, or to `until_us`.

    `observe` is called after every update with the state before, the event, the state after and the effects. Raises
    SchedulerError if sequences are left and nothing more will happen.
    """
    run = _Run(config, cost, observe)
    for sequence_id, request in enumerate(sorted(arrivals, key=lambda r: r.arrival_us)):
        run.expect(sequence_id, request)
    run.to(until_us)
    return run.recorder.report(config, run.now_us)


class _Run:
    """A simulation under way. `device_us` and `links_us` say until when the device and each way of a link are busy."""

    def __init__(self, config: SchedulerConfig, cost: CostModel, observe: Observer | None) -> None:
        self.state = init(config)
        self.cost = cost
        self.observe = observe
        self.recorder = Recorder(cost)
        self.now_us = 0
        self.device_us = 0
        self.links_us: dict[tuple[Tier, bool], int] = {}
        self.coming: list[tuple[int, int, int, SimRequest | StepPlan | Transfer]] = []
        self._order = count()

    def expect(self, sequence_id: int, request: SimRequest) -> None:
        self.recorder.tracks[sequence_id] = Track(request)
        heappush(self.coming, (request.arrival_us, _ARRIVAL, sequence_id, request))

    def to(self, until_us: int | None) -> None:
        while self.coming and (until_us is None or self.coming[0][0] <= until_us):
            self.now_us = self.coming[0][0]
            step_ended = False
            while self.coming and self.coming[0][0] == self.now_us:
                _, kind, key, what = heappop(self.coming)
                step_ended |= kind == _STEP
                self._send(self._event(key, what))
            # An arrival in the middle of a step waits for its end, as the engine does.
            if step_ended or not self.state.in_flight:
                self._plan()
        if not self.coming and (self.state.running or self.state.waiting.places):
            raise SchedulerError(f"{len(self.state.waiting)} sequences wait and nothing more will happen")
        if until_us is not None:
            self.now_us = max(self.now_us, until_us)

    def _event(self, key: int, what: SimRequest | StepPlan | Transfer) -> Event:
        match what:
            case SimRequest():
                names = what.names(key, self.state.config.block_size)
                return Arrived(what.for_scheduler(key), names, self.now_us)
            case StepPlan():
                return StepDone(what.plan_id, tuple([self._result(row) for row in what.rows]), self.now_us)
            case Transfer():
                return TransferDone(key, True, self.now_us)
            case _:
                assert_never(what)

    def _plan(self) -> None:
        while (num_in_flight := len(self.state.in_flight)) < self.state.config.max_steps_in_flight:
            self._send(StepDue(self.now_us))
            if len(self.state.in_flight) == num_in_flight:
                return

    def _send(self, event: Event) -> None:
        before = self.state
        self.state, effects = update(before, event)
        self.recorder.see(before, event, self.state, effects)
        if self.observe is not None:
            self.observe(before, event, self.state, effects)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case RunStep(plan):
                end_us = self._occupy_device(self.cost.step_us(plan), is_copy=False)
                heappush(self.coming, (end_us, _STEP, next(self._order), plan))
            case CopyBlocks(pairs):
                self._occupy_device(self.cost.copies_us(len(pairs)), is_copy=True)
            case SwapOut(transfer_id, tier, moves):
                gathered_us = self._occupy_device(self.cost.copies_us(len(moves)), is_copy=True)
                self._transfer(transfer_id, tier, len(moves), ready_us=gathered_us, to_device=False)
            case Fetch(transfer_id, tier, block_ids):
                self._transfer(transfer_id, tier, len(block_ids), ready_us=self.now_us, to_device=True)
            case Discard() | Preempt() | Finish() | Reject():
                pass
            case _:
                assert_never(effect)

    def _occupy_device(self, work_us: int, *, is_copy: bool) -> int:
        """Queue work behind what the device has; the time at which it will be done."""
        start_us = max(self.device_us, self.now_us + round(self.cost.host_us))
        self.device_us = start_us + work_us
        self.recorder.add_busy(work_us, is_copy=is_copy)
        return self.device_us

    def _transfer(self, transfer_id: int, tier: Tier, num_blocks: int, *, ready_us: int, to_device: bool) -> None:
        """Queue blocks behind what their way of the link has."""
        start_us = max(ready_us, self.links_us.get((tier, to_device), 0))
        end_us = self.links_us[tier, to_device] = start_us + self.cost.transfer_us(tier, num_blocks)
        transfer = Transfer(self.now_us, end_us, tier, to_device, num_blocks)
        self.recorder.transfers.append(transfer)
        heappush(self.coming, (end_us, _TRANSFER, transfer_id, transfer))

    def _result(self, row: Row) -> RowResult:
        """What a row gives: a token, unless it does not sample or the sequence ended with the one before."""
        track = self.recorder.tracks[row.sequence_id]
        num_sampled, request = len(track.token_us), track.request
        if not row.samples or num_sampled == request.output_len:
            return RowResult(row.sequence_id, 0)
        num_sampled += 1
        finish = None
        if num_sampled == request.output_len:
            finish = FinishReason.STOP if num_sampled < (request.max_tokens or num_sampled) else FinishReason.LENGTH
        size, num_tokens = self.state.config.block_size, request.prompt_len + num_sampled
        fills, num_full = num_tokens % size == 0 and request.has_names(size), num_tokens // size
        names = unique_names(row.sequence_id, num_full - 1, num_full) if fills else ()
        return RowResult(row.sequence_id, 1, finish, names)
