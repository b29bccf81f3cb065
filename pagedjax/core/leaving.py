"""Leaving the running set, once no step in flight contains the sequence any more."""

from pagedjax.core import waiting as lines
from pagedjax.core.blocks import give
from pagedjax.core.effects import Effect, Finish, Preempt
from pagedjax.core.errors import SchedulerError
from pagedjax.core.parking import let_go, park, phase_of
from pagedjax.core.phases import Cause, Phase, next_phase
from pagedjax.core.policy import STAYS
from pagedjax.core.request import FinishReason
from pagedjax.core.state import Sequence, State
from pagedjax.core.tenants import ended, enter
from pagedjax.core.tiers import Tiers

_WAITS = (Phase.WAITING, Phase.SWAPPING_OUT, Phase.SWAPPED)
_CAUSES = {Phase.WAITING: Cause.DRAIN, Phase.SWAPPING_OUT: Cause.SWAP, Phase.SWAPPED: Cause.KEEP}


def drain(state: State) -> tuple[State, tuple[Effect, ...]]:
    """Send off every sequence that is marked to leave and is in no plan in flight, and free its blocks."""
    leavers = [s for s in state.running if s.phase is not Phase.RUNNING and s.num_in_flight == 0]
    leavers = [s for s in leavers if s.phase not in STAYS]
    if not leavers:
        return state, ()
    effects: list[Effect] = []
    for sequence in leavers:
        if sequence.phase is Phase.YIELDING:
            state, more = _back_in_line(state, sequence)
        else:
            state, more = end(state, sequence)
        effects += more
    running = tuple([s for s in state.running if s.phase in STAYS or s.num_in_flight > 0])
    shared_tails = state.shared_tails
    if shared_tails:
        shared_tails = frozenset([b for b in shared_tails if state.pool.counts.get(b, 0) > 1])
    return state._replace(running=running, shared_tails=shared_tails), tuple(effects)


def end(state: State, sequence: Sequence) -> tuple[State, tuple[Effect, ...]]:
    """Free all that a sequence has, in every tier. One that is in line is to be taken out of it first."""
    if sequence.finish is None:
        raise SchedulerError(f"sequence {sequence.sequence_id} ends without a reason")
    next_phase(sequence.phase, Cause.ABORT if sequence.phase in _WAITS else Cause.DRAIN)
    pool = give(state.pool, sequence.blocks, sequence.block_hashes)
    pool, tiers, effects = let_go(pool, state.tiers, sequence, state.config.block_size)
    tenants = state.tenants
    if sequence.finish in (FinishReason.STOP, FinishReason.LENGTH):
        tenants = ended(tenants, sequence.request.tenant, sequence.num_tokens - sequence.request.prompt_len)
    suspects = tuple([i for i in state.suspects if i != sequence.sequence_id])
    state = state._replace(pool=pool, tiers=tiers, tenants=tenants, suspects=suspects)
    return state, (*effects, Finish(sequence.sequence_id, sequence.finish))


def back_in_line(sequence: Sequence, now_us: int) -> Sequence:
    """The sequence with its tokens but without its blocks: what is left of them, `tiers.parked` says."""
    return sequence._replace(
        phase=Phase.WAITING,
        num_expected=sequence.num_tokens + sequence.awaits_choice,
        num_computed=0,
        num_planned=0,
        num_cached=0,
        blocks=(),
        stay=sequence.stay._replace(
            since_us=now_us, num_served=max(sequence.stay.num_served, sequence.num_computed), reserved=False
        ),
    )


def settle(state: State, sequence_id: int) -> State:
    """Bring the phase of a sequence in line up to date with its copies."""
    sequence = lines.find(state.waiting, sequence_id)
    if sequence is None or sequence.phase is Phase.WAITING:
        return state
    phase = phase_of(state.tiers, sequence_id)
    if phase is sequence.phase:
        return state
    next_phase(sequence.phase, Cause.LOSE if phase is Phase.WAITING else Cause.STORE)
    waiting = lines.remove(state.waiting, sequence)
    return state._replace(waiting=lines.park(waiting, sequence._replace(phase=phase)))


def _back_in_line(state: State, sequence: Sequence) -> tuple[State, tuple[Effect, ...]]:
    pool, tiers = state.pool, state.tiers
    effects: tuple[Effect, ...] = ()
    if sequence.blocks:  # else they were needed in the middle of planning, and given up there
        pool, tiers, effects = park(pool, tiers, sequence, state.config)
    phase = phase_of(tiers, sequence.sequence_id)
    next_phase(sequence.phase, _CAUSES[phase])
    tenant, config = sequence.request.tenant, state.config
    tenants = enter(state.tenants, tenant, state.waiting.queues, config.tenant_weights, config.credit)
    waiting = lines.park(state.waiting, back_in_line(sequence, state.now_us)._replace(phase=phase))
    effects = (*effects, _preempt(tiers, sequence, state.config.block_size))
    return state._replace(pool=pool, tiers=tiers, waiting=waiting, tenants=tenants), effects


def _preempt(tiers: Tiers, sequence: Sequence, block_size: int) -> Preempt:
    parked = tiers.parked[sequence.sequence_id]
    num_lost = max(0, parked.num_computed - len(parked.copies) * block_size)
    method = "recompute" if not parked.copies else "partial" if len(parked.copies) < len(parked.names) else "swap"
    return Preempt(sequence.sequence_id, num_lost, method, sequence.stay.reason)
