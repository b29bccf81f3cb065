"""Folds the scheduler's events and effects into a report: the simulator's metrics."""

from array import array
from dataclasses import dataclass, field

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Effect, Finish, Preempt, Reject, RunStep
from pagedjax.core.events import Event, StepDone, StepDue
from pagedjax.core.phases import Phase
from pagedjax.core.plan import Row, StepPlan
from pagedjax.core.state import State
from pagedjax.core.tenants import SAMPLE_COST
from pagedjax.simulator.cost import CostModel
from pagedjax.simulator.report import Outcome, Preemption, Service, SimReport, Status, Switch, Totals, Transfer, Usage
from pagedjax.simulator.workload import SimRequest


@dataclass(slots=True)
class Track:
    """One sequence as it goes. `high_water` positions have been planned once; below it a row computes again."""

    request: SimRequest
    status: Status = Status.UNFINISHED
    token_us: "array[int]" = field(default_factory=lambda: array("q"))
    wait_us: int | None = None
    parked_us: int = 0
    parked_at_us: int | None = None
    num_preemptions: int = 0
    num_recomputed: int = 0
    high_water: int = 0
    num_executed: int = 0


class Recorder:
    """Sees every update, in order; `report` may be asked at any time."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.tracks: dict[int, Track] = {}
        self.preemptions: list[Preemption] = []
        self.switches: list[Switch] = []
        self.usage: list[Usage] = []
        self.transfers: list[Transfer] = []
        self.service: dict[str, list[Service]] = {}
        self._totals: dict[str, int] = dict.fromkeys(Totals._fields, 0)
        self._level = Usage(0, 0, 0, 0, 0, 0)
        self._decided_us: dict[int, int] = {}  # when a sequence was told to yield
        self._switching_us: list[int] = []  # when those decided that nobody has profited from yet

    def see(self, before: State, event: Event, state: State, effects: tuple[Effect, ...]) -> None:
        self._integrate(event.now_us, state)
        if isinstance(event, StepDue):
            self._note_decisions(state)
        for effect in effects:
            match effect:
                case RunStep(plan):
                    self._planned(plan, state)
                case Preempt():
                    self._preempted(effect, event.now_us)
                case Finish(sequence_id):
                    self.tracks[sequence_id].status = Status.FINISHED
                case Reject(sequence_id):
                    self.tracks[sequence_id].status = Status.REJECTED
        if isinstance(event, StepDone):
            self._done(before.in_flight[0], event)
        if isinstance(event, StepDue):
            self.usage.append(self._level)

    def add_busy(self, busy_us: int, *, is_copy: bool) -> None:
        self._totals["busy_us"] += busy_us
        self._totals["lost_us"] += busy_us * is_copy

    def report(self, config: SchedulerConfig, end_us: int) -> SimReport:
        outcomes = [
            Outcome(
                sequence_id,
                track.request,
                track.status,
                track.token_us,
                track.wait_us,
                track.parked_us,
                track.num_preemptions,
                track.num_recomputed,
            )
            for sequence_id, track in self.tracks.items()
        ]
        return SimReport(
            config=config,
            cost=self.cost,
            end_us=end_us,
            outcomes=tuple(outcomes),
            preemptions=tuple(self.preemptions),
            switches=tuple(self.switches),
            usage=tuple(self.usage),
            transfers=tuple(self.transfers),
            service={tenant: tuple(samples) for tenant, samples in self.service.items()},
            totals=Totals(**self._totals),
        )

    def _integrate(self, now_us: int, state: State) -> None:
        """Add the time since the last event at the level that held, and take the new level."""
        past, block_size, totals = self._level, state.config.block_size, self._totals
        elapsed_us = now_us - past.now_us
        totals["held_slot_us"] += elapsed_us * past.held_blocks * block_size
        totals["planned_slot_us"] += elapsed_us * past.planned_slots
        totals["computed_slot_us"] += elapsed_us * past.computed_slots
        totals["running_us"] += elapsed_us * past.num_running
        held = len(state.pool.counts)
        # Shared blocks are full, so what is empty or not yet computed of a table is the sequence's own. Blocks that
        # await what is fetched for them are in use.
        holders = [(s, len(s.blocks) * block_size) for s in state.running if s.blocks]
        unplanned = sum(
            [n - (min(n, s.num_tokens) if s.phase is Phase.FETCHING else s.num_planned) for s, n in holders]
        )
        uncomputed = sum([n - s.num_computed for s, n in holders])
        self._level = Usage(
            now_us,
            len(state.running),
            len(state.waiting),
            held,
            held * block_size - unplanned,
            held * block_size - uncomputed,
        )

    def _planned(self, plan: StepPlan, state: State) -> None:
        totals = self._totals
        totals["num_steps"] += 1
        totals["computed_tokens"] += plan.num_tokens
        new_rows, num_again = [], 0
        for row in plan.rows:
            track, end = self.tracks[row.sequence_id], row.start + row.length
            self._start(track, row, state.now_us)
            track.num_executed += row.length
            first_new = max(row.start, min(end, track.high_water))
            track.num_recomputed += first_new - row.start
            num_again += first_new - row.start
            if first_new < end:
                new_rows.append(row._replace(start=first_new, length=end - first_new))
            num_served = min(end, track.request.prompt_len) - max(row.start, track.high_water)
            self._serve(track, state.now_us, num_served)
            track.high_water = max(track.high_water, end)
        if num_again:
            totals["recomputed_tokens"] += num_again
            totals["lost_us"] += self.cost.rows_us(plan.rows) - (self.cost.rows_us(new_rows) if new_rows else 0)
        totals["lost_us"] += self.cost.copies_us(sum(len(scatter.pairs) for scatter in plan.scatters))

    def _start(self, track: Track, row: Row, now_us: int) -> None:
        """Count the end of a wait, if this is the first row since the sequence arrived or was preempted."""
        if track.wait_us is not None and track.parked_at_us is None:
            return
        if track.wait_us is None:
            track.wait_us = now_us - track.request.arrival_us
            self._totals["cached_tokens"] += row.start
        if track.parked_at_us is not None:
            track.parked_us += now_us - track.parked_at_us
            track.parked_at_us = None
            track.num_executed = 0
        if self._switching_us:
            self.switches.append(Switch(self._switching_us.pop(0), now_us + round(self.cost.host_us)))

    def _note_decisions(self, state: State) -> None:
        for sequence in state.running:
            if sequence.phase is Phase.YIELDING:
                self._decided_us.setdefault(sequence.sequence_id, state.now_us)

    def _preempted(self, effect: Preempt, now_us: int) -> None:
        track = self.tracks[effect.sequence_id]
        track.num_preemptions += 1
        track.parked_at_us = now_us
        decided_us = self._decided_us.pop(effect.sequence_id, now_us)
        if effect.reason not in ("memory", "failure"):
            self._switching_us.append(decided_us)
        self.preemptions.append(
            Preemption(
                now_us,
                effect.sequence_id,
                effect.method,
                effect.reason,
                effect.num_lost_tokens,
                track.num_executed,
            )
        )

    def _serve(self, track: Track, now_us: int, num_tokens: int) -> None:
        if num_tokens > 0:
            samples = self.service.setdefault(track.request.tenant, [])
            total = num_tokens + (samples[-1].num_tokens if samples else 0)
            if samples and samples[-1].now_us == now_us:
                samples.pop()
            samples.append(Service(now_us, total))

    def _done(self, plan: StepPlan, event: StepDone) -> None:
        for row, result in zip(plan.rows, event.results):
            if result.num_accepted:
                track = self.tracks[row.sequence_id]
                track.token_us.append(event.now_us)
                self._serve(track, event.now_us, SAMPLE_COST)
            elif row.samples:
                self._totals["discarded_tokens"] += 1
