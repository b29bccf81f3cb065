"""The latest steps one by one, so that whoever looks now and then misses none: a fold over events and effects."""

from collections import deque
from typing import NamedTuple

from pagedjax.core.effects import Effect, RunStep
from pagedjax.core.events import Event, StepDone, StepFailed
from pagedjax.core.plan import StepPlan
from pagedjax.core.state import State

MAX_STEPS = 4096


class StepRecord(NamedTuple):
    """A step that is over. Its `number` is its plan's; times are of the scheduler's clock, and since one step is
    planned while another runs, spans overlap. `num_tokens` counts all rows, of which `num_decodes` have one token.
    `num_running` and `num_waiting` are sequences when it was planned. One that `failed` lost the device's cache."""

    number: int
    planned_us: int
    done_us: int
    num_rows: int
    num_decodes: int
    num_tokens: int
    num_running: int
    num_waiting: int
    failed: bool = False


class StepHistory:
    """Mutable; belongs to the engine's thread, but for `since`."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._in_flight: dict[int, StepRecord] = {}

    def see(self, event: Event, after: State, effects: tuple[Effect, ...]) -> None:
        """Take in what came of an event."""
        match event:
            case StepDone(plan_id=plan_id, now_us=now_us):
                self._steps.append(self._in_flight.pop(plan_id)._replace(done_us=now_us))
            case StepFailed(now_us=now_us):
                self._steps.extend(one._replace(done_us=now_us, failed=True) for one in self._in_flight.values())
                self._in_flight.clear()
            case _:
                pass
        for effect in effects:
            if isinstance(effect, RunStep):
                self._in_flight[effect.plan.plan_id] = _begun(effect.plan, after)

    def since(self, number: int, limit: int) -> list[StepRecord]:
        """The steps with a number above this one that are still known, oldest first; of more than `limit` the latest.
        Safe on any thread."""
        found = [step for step in tuple(self._steps) if step.number > number]
        return found[-limit:]


def _begun(plan: StepPlan, state: State) -> StepRecord:
    lengths = [row.length for row in plan.rows]
    return StepRecord(
        plan.plan_id,
        state.now_us,
        0,
        len(lengths),
        lengths.count(1),
        sum(lengths),
        len(state.running),
        len(state.waiting),
    )
