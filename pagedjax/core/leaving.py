"""Leaving the running set, once no step in flight contains the sequence any more."""

from dataclasses import replace

from pagedjax.core import waiting as lines
from pagedjax.core.blocks import give
from pagedjax.core.errors import SchedulerError
from pagedjax.core.request import FinishReason
from pagedjax.core.state import Cause, Effect, Finish, Phase, Preempt, Sequence, State, next_phase
from pagedjax.core.tenants import ended, enter


def drain(state: State) -> tuple[State, tuple[Effect, ...]]:
    """Send off every sequence that is marked to leave and is in no plan in flight, and free its blocks."""
    leavers = [s for s in state.running if s.phase is not Phase.RUNNING and s.num_in_flight == 0]
    if not leavers:
        return state, ()
    pool, waiting, tenants = state.pool, state.waiting, state.tenants
    effects: list[Effect] = []
    for sequence in leavers:
        pool = give(pool, sequence.blocks, sequence.block_hashes)
        if next_phase(sequence.phase, Cause.DRAIN) is Phase.WAITING:
            tenants = enter(tenants, sequence.request.tenant, waiting.queues, state.config.tenant_weights)
            waiting = lines.park(waiting, back_in_line(sequence, state.now_us))
            effects.append(Preempt(sequence.sequence_id, sequence.num_computed, reason=sequence.stay.reason))
        else:
            effects.append(_finish(sequence))
            if sequence.finish in (FinishReason.STOP, FinishReason.LENGTH):
                tenants = ended(tenants, sequence.request.tenant, sequence.num_tokens - sequence.request.prompt_len)
    running = tuple([s for s in state.running if s.phase is Phase.RUNNING or s.num_in_flight > 0])
    return replace(state, running=running, pool=pool, waiting=waiting, tenants=tenants), tuple(effects)


def back_in_line(sequence: Sequence, now_us: int) -> Sequence:
    """The sequence with its tokens but without its blocks: its keys and values will be computed again."""
    return sequence._replace(
        phase=Phase.WAITING,
        num_expected=sequence.num_tokens,
        num_computed=0,
        num_planned=0,
        num_cached=0,
        blocks=(),
        stay=sequence.stay._replace(
            since_us=now_us, num_served=max(sequence.stay.num_served, sequence.num_computed), reserved=False
        ),
    )


def _finish(sequence: Sequence) -> Finish:
    if sequence.finish is None:
        raise SchedulerError(f"sequence {sequence.sequence_id} ends without a reason")
    return Finish(sequence.sequence_id, sequence.finish)
