"""The one door: `update(state, event) -> (state, effects)`.

A pure function: no clock, no device, no token ids, no text. Times and hashes come in with events, so a recorded
stream of events replays to equal effects, and every state is a snapshot that can be kept, compared or resumed.
"""

from dataclasses import replace
from typing import assert_never

from pagedjax.core import waiting as lines
from pagedjax.core.arriving import arrived
from pagedjax.core.blocks import make_pool
from pagedjax.core.config import FIXED, SchedulerConfig
from pagedjax.core.confirming import step_done
from pagedjax.core.effects import Effect
from pagedjax.core.errors import ConfigError, SchedulerError
from pagedjax.core.events import (
    Aborted,
    Arrived,
    ConfigChanged,
    Event,
    StepDone,
    StepDue,
    StepFailed,
    TenantChanged,
    TransferDone,
)
from pagedjax.core.failing import step_failed
from pagedjax.core.leaving import drain, end
from pagedjax.core.phases import Cause, next_phase
from pagedjax.core.planning import plan_step
from pagedjax.core.request import FinishReason
from pagedjax.core.state import Sequence, State, Waiting
from pagedjax.core.tenants import leave, reweighted
from pagedjax.core.tiers import make_tiers
from pagedjax.core.transfers import transfer_done


def init(config: SchedulerConfig) -> State:
    """The empty state: nothing waits, nothing runs, every block is free."""
    tiers = make_tiers(config.num_host_blocks, config.num_disk_blocks)
    return State(config, Waiting(), (), make_pool(config.num_blocks), (), (), 0, 0, tiers)


def update(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The state after `event`, and the effects to carry out, in order.

    Raises SchedulerError for an event that cannot follow this state; the old state still stands.
    """
    if event.now_us < state.now_us:
        raise SchedulerError(f"time runs backwards: {event.now_us} after {state.now_us}")
    if event.now_us > state.now_us:
        state = state._replace(now_us=event.now_us)
    match event:
        case Arrived():
            return arrived(state, event)
        case Aborted():
            return _aborted(state, event.sequence_id)
        case StepDue():
            if len(state.in_flight) >= state.config.max_steps_in_flight:
                return state, ()
            return plan_step(state)
        case StepDone():
            return step_done(state, event)
        case StepFailed():
            return step_failed(state, event)
        case TransferDone():
            return transfer_done(state, event)
        case ConfigChanged():
            return _config_changed(state, event.config), ()
        case TenantChanged():
            return _config_changed(state, replace(state.config, tenant_weights=event.weights)), ()
        case _:
            assert_never(event)


def _config_changed(state: State, config: SchedulerConfig) -> State:
    for name in FIXED:
        if getattr(config, name) != getattr(state.config, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{name} cannot change while the engine runs; set {flag} and start it anew")
    tenants = state.tenants
    if config.tenant_weights != state.config.tenant_weights:
        tenants = reweighted(tenants, config.tenant_weights)
    return state._replace(config=config, tenants=tenants, config_since=state.next_plan_id)


def _aborted(state: State, sequence_id: int) -> tuple[State, tuple[Effect, ...]]:
    waiter = lines.find(state.waiting, sequence_id)
    if waiter is not None:
        # It is in no step in flight, so it is gone at once.
        waiting = lines.remove(state.waiting, waiter)
        tenants = leave(state.tenants, state.waiting.queues, waiting.queues)
        state = state._replace(waiting=waiting, tenants=tenants)
        return end(state, waiter._replace(finish=FinishReason.ABORT))
    index = next((i for i, s in enumerate(state.running) if s.request.sequence_id == sequence_id), None)
    if index is None:
        return state, ()
    running = (*state.running[:index], _abort(state.running[index]), *state.running[index + 1 :])
    return drain(state._replace(running=running))


def _abort(sequence: Sequence) -> Sequence:
    return sequence._replace(
        phase=next_phase(sequence.phase, Cause.ABORT), finish=sequence.finish or FinishReason.ABORT
    )
