"""Choices: tokens that the host names later, when it has heard others too (beams).

A row of a sequence that `needs_confirmation` may end without a token: the sequence then *awaits a choice*. It keeps its
slot and its blocks, or its place in line if they are taken from it, and is in no plan until the choice comes with the
StepDone of a later plan: a token, an end, forks, or several of these. So the beams of a group need not be in one step:
each is computed when there is room for it, and the last one brings the choice for all.

Who awaits a choice holds blocks and gives nothing. Where nobody runs but such, while those whose rows would bring the
choice stand in line without room, it gives way, the lowest rank first: so a group may be larger than the cache.
"""

from collections.abc import Container

from pagedjax.core import waiting as lines
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Effect
from pagedjax.core.errors import SchedulerError
from pagedjax.core.forking import child_of
from pagedjax.core.leaving import drain, end
from pagedjax.core.parking import park_without_device, phase_of
from pagedjax.core.phases import Cause, next_phase
from pagedjax.core.plan import Fork, RowResult
from pagedjax.core.policy import order_of
from pagedjax.core.prefix import check_names
from pagedjax.core.request import FinishReason
from pagedjax.core.state import Sequence, State
from pagedjax.core.tenants import leave
from pagedjax.core.yielding import yields


def choose(state: State, choices: tuple[RowResult, ...]) -> tuple[State, tuple[Effect, ...]]:
    """Give sequences that await a choice their token or their end. Forks of those in line get in line; `add_children`
    makes those of running ones."""
    running = {s.sequence_id: s for s in state.running}
    queues, effects = state.waiting.queues, list[Effect]()
    for choice in choices:
        sequence = running.get(choice.sequence_id)
        if sequence is not None:
            running[choice.sequence_id] = _chosen(sequence, choice, state.config)
            continue
        state, more = _choose_in_line(state, choice, running)
        effects += more
    tenants = leave(state.tenants, queues, state.waiting.queues)
    return state._replace(running=tuple(running.values()), tenants=tenants), tuple(effects)


def is_stuck(state: State) -> bool:
    """Whether those in line can only come to run if those that run, all of which await a choice, give way."""
    if state.in_flight or not state.running or not state.waiting.places or state.tiers.transfers:
        return False
    if not all(sequence.awaits_choice for sequence in state.running):
        return False
    return any(not sequence.awaits_choice for sequence in lines.in_rank_order(state.waiting))


def give_way(state: State) -> tuple[State, tuple[Effect, ...]]:
    """The lowest-ranked of those that run gets in line."""
    order = order_of(state, {})
    last = max(state.running, key=order.running)
    return drain(state._replace(running=tuple([yields(s, "memory") if s is last else s for s in state.running])))


def _choose_in_line(state: State, choice: RowResult, running: Container[int]) -> tuple[State, tuple[Effect, ...]]:
    waiter = lines.find(state.waiting, choice.sequence_id)
    if waiter is None:
        raise SchedulerError(f"sequence {choice.sequence_id} is not here")
    chosen = _chosen(waiter, choice, state.config)
    state = state._replace(waiting=lines.remove(state.waiting, waiter))
    for fork in choice.children:
        if fork.sequence_id in running or fork.sequence_id in state.waiting.places:
            raise SchedulerError(f"sequence {fork.sequence_id} is here already")
        state = _with_child_in_line(state, chosen, fork)
    if chosen.finish is not None:
        return end(state, chosen)
    return state._replace(waiting=lines.park(state.waiting, chosen)), ()


def _with_child_in_line(state: State, parent: Sequence, fork: Fork) -> State:
    """A fork of a sequence in line. It finds what has a name that others know, in whatever tier."""
    num_kept = state.tiers.parked[parent.sequence_id].num_computed
    child = child_of(parent, fork, state.config)._replace(num_computed=num_kept)
    tiers, _ = park_without_device(state.tiers, child, state.config.block_size)
    child = child._replace(phase=phase_of(tiers, child.sequence_id), num_computed=0)
    return state._replace(tiers=tiers, waiting=lines.park(state.waiting, child))


def _chosen(sequence: Sequence, choice: RowResult, config: SchedulerConfig) -> Sequence:
    """The sequence with what was chosen for it."""
    sequence_id, request = sequence.sequence_id, sequence.request
    if not sequence.awaits_choice:
        raise SchedulerError(f"sequence {sequence_id} awaits no choice")
    num_tokens = sequence.num_tokens + choice.num_accepted
    names = sequence.block_hashes + (choice.block_hashes if sequence.stay.named else ())
    check_names(sequence_id, names, num_tokens, config.block_size)
    if choice.finish is not None:
        phase = next_phase(sequence.phase, Cause.FINISH) if sequence.blocks else sequence.phase
        return sequence._replace(phase=phase, num_tokens=num_tokens, finish=FinishReason(choice.finish))
    if choice.num_accepted != 1 or num_tokens - request.prompt_len >= request.max_tokens:
        raise SchedulerError(f"sequence {sequence_id} cannot go on with this choice: {choice}")
    return sequence._replace(num_tokens=num_tokens, block_hashes=names)
