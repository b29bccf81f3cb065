"""A failed step: the device has lost its cache, and nobody but the guilty may be lost with it.

All blocks of the device are clean again and all plans in flight are void. Every sequence goes back in line with the
tokens that were confirmed, swapped if lower tiers have copies of its leading blocks. Those that may have made the step
fail, the *suspects*, are then tried alone, one after the other; one that fails alone too ends with an error.
"""

from pagedjax.core.blocks import make_pool
from pagedjax.core.effects import Effect
from pagedjax.core.errors import SchedulerError
from pagedjax.core.events import StepFailed
from pagedjax.core.leaving import drain
from pagedjax.core.parking import park_without_device
from pagedjax.core.phases import Cause, next_phase
from pagedjax.core.plan import RowResult, StepPlan
from pagedjax.core.policy import STAYS
from pagedjax.core.request import FinishReason
from pagedjax.core.state import Sequence, State
from pagedjax.core.yielding import yields


def step_failed(state: State, event: StepFailed) -> tuple[State, tuple[Effect, ...]]:
    plan = next((plan for plan in state.in_flight if plan.plan_id == event.plan_id), None)
    if plan is None:
        raise SchedulerError(f"plan {event.plan_id} is not in flight")
    guilty = _guilty(state, plan)
    suspects = dict.fromkeys((*state.suspects, *(event.suspects or [row.sequence_id for row in plan.rows])))
    tiers, running = state.tiers, []
    effects: tuple[Effect, ...] = ()
    for sequence in state.running:
        sequence = _marked(sequence, guilty)
        if sequence.finish is None:
            tiers, more = park_without_device(tiers, sequence, state.config.block_size)
            effects += more
        # What the lost steps would have sampled is expected no more.
        num_expected = sequence.num_tokens if sequence.num_in_flight else sequence.num_expected
        running.append(sequence._replace(num_expected=num_expected, num_in_flight=0, blocks=()))
    here = {s.sequence_id for s in running if s.finish is None} | set(state.suspects)
    state = state._replace(
        running=tuple(running),
        pool=make_pool(state.config.num_blocks),
        tiers=tiers,
        pending=(),
        in_flight=(),
        shared_tails=frozenset(),
        suspects=tuple([i for i in suspects if i in here]),
    )
    state, more = drain(state)
    return state, effects + more


def without_cleared(suspects: tuple[int, ...], plan: StepPlan, results: tuple[RowResult, ...]) -> tuple[int, ...]:
    """The suspects but those that a step has now brought to their next token or their end."""
    cleared = {row.sequence_id for row, result in zip(plan.rows, results) if row.samples or result.finish}
    return tuple([i for i in suspects if i not in cleared])


def _guilty(state: State, plan: StepPlan) -> int | None:
    """Who was tried alone, and failed."""
    (first, *others) = plan.rows
    return first.sequence_id if not others and first.sequence_id in state.suspects else None


def _marked(sequence: Sequence, guilty: int | None) -> Sequence:
    if sequence.finish is None and sequence.sequence_id == guilty:
        return sequence._replace(phase=next_phase(sequence.phase, Cause.FINISH), finish=FinishReason.ERROR)
    if sequence.phase in STAYS:
        return yields(sequence, "failure")
    return sequence
