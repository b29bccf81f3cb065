"""Every edge of TRANSITIONS is walked by real events, and there is no other."""

from itertools import product

import pytest

from pagedjax.core.errors import SchedulerError
from pagedjax.core.phases import TRANSITIONS, Cause, Phase, next_phase
from pagedjax.core.waiting import find
from tests.core import test_leaving as makers
from tests.core import test_swapping as swaps
from tests.core.world import World


def arrive():
    world = World()
    return world, len(world.tokens), lambda: world.arrive(5)


def admit():
    world = World()
    return world, world.arrive(5), world.due


def abort_of(make):
    def scenario():
        world, sequence_id = make()
        return world, sequence_id, lambda: world.abort(sequence_id)

    return scenario


def preempt():
    world = World(num_blocks=6, enable_prefix_caching=False, async_scheduling=True)
    for _ in range(3):
        world.arrive(4, max_tokens=12)
    world.due()
    while len(world.tokens[2]) < 8:
        world.due()
        world.done()
    return world, 2, world.due


def finish():
    world = World(async_scheduling=True, stop_every=1)
    world.arrive(5)
    world.due()
    world.due()
    return world, 0, world.done


def drain_of(make):
    def scenario():
        world, sequence_id = make()
        while world.sequence(sequence_id).num_in_flight > 1:
            world.done()
        return world, sequence_id, world.done

    return scenario


def finishing():
    world, sequence_id, event = finish()
    event()
    return world, sequence_id


def finish_while_yielding():
    world, sequence_id = makers.yielding()
    world.stop_every = 1
    return world, sequence_id, world.done


def step_due_of(make):
    def scenario():
        world, sequence_id = make()
        return world, sequence_id, world.due

    return scenario


def transfer_of(make, *, ok=True):
    def scenario():
        world, sequence_id = make()
        return world, sequence_id, lambda: world.transfer(ok=ok)

    return scenario


def keep():
    """It has been swapped once, runs, must yield, and then the device loses its blocks."""
    world, sequence_id = swaps.yielding_again()
    return world, sequence_id, world.fail


def lose_a_shared_copy():
    world, _, swapped = swaps.two_with_shared_copies()
    return world, swapped, lambda: world.transfer(ok=False)


# In these the sequence is drained by the same event: it is seen only where that leads.
DRAINED_TOO = {
    (Phase.YIELDING, Cause.FINISH): Cause.DRAIN,
    (Phase.FETCHING, Cause.PREEMPT): Cause.KEEP,
    (Phase.FETCHING, Cause.LOSE): Cause.DRAIN,
    (Phase.FETCHING, Cause.ABORT): Cause.DRAIN,
}

SCENARIOS = {
    (Phase.NEW, Cause.ARRIVE): arrive,
    (Phase.WAITING, Cause.ADMIT): admit,
    (Phase.WAITING, Cause.ABORT): abort_of(makers.waiting),
    (Phase.RUNNING, Cause.PREEMPT): preempt,
    (Phase.RUNNING, Cause.FINISH): finish,
    (Phase.RUNNING, Cause.ABORT): abort_of(makers.in_flight),
    (Phase.YIELDING, Cause.DRAIN): drain_of(makers.yielding),
    (Phase.YIELDING, Cause.FINISH): finish_while_yielding,
    (Phase.YIELDING, Cause.ABORT): abort_of(makers.yielding),
    (Phase.YIELDING, Cause.SWAP): drain_of(swaps.yielding),
    (Phase.YIELDING, Cause.KEEP): keep,
    (Phase.SWAPPING_OUT, Cause.STORE): transfer_of(swaps.swapping_out),
    (Phase.SWAPPING_OUT, Cause.LOSE): transfer_of(swaps.swapping_out, ok=False),
    (Phase.SWAPPING_OUT, Cause.ADMIT): step_due_of(swaps.swapping_out_with_all_blocks_there),
    (Phase.SWAPPING_OUT, Cause.ABORT): abort_of(swaps.swapping_out),
    (Phase.SWAPPED, Cause.ADMIT): step_due_of(swaps.swapped_with_all_blocks_there),
    (Phase.SWAPPED, Cause.FETCH): step_due_of(swaps.next_in_line),
    (Phase.SWAPPED, Cause.LOSE): lose_a_shared_copy,
    (Phase.SWAPPED, Cause.ABORT): abort_of(swaps.swapped),
    (Phase.FETCHING, Cause.LAND): transfer_of(swaps.fetching),
    (Phase.FETCHING, Cause.PREEMPT): step_due_of(swaps.fetching_in_the_way),
    (Phase.FETCHING, Cause.LOSE): transfer_of(swaps.fetching, ok=False),
    (Phase.FETCHING, Cause.ABORT): abort_of(swaps.fetching),
    (Phase.FINISHING, Cause.ABORT): abort_of(finishing),
    (Phase.FINISHING, Cause.DRAIN): drain_of(finishing),
    (Phase.ABORTING, Cause.ABORT): abort_of(makers.aborting),
    (Phase.ABORTING, Cause.DRAIN): drain_of(makers.aborting),
}


def test_there_is_a_scenario_for_every_edge():
    assert set(SCENARIOS) == set(TRANSITIONS)


@pytest.mark.parametrize(("source", "cause"), SCENARIOS)
def test_the_edge_is_walked_by_a_real_event(source, cause):
    world, sequence_id, event = SCENARIOS[source, cause]()
    assert phase_of(world, sequence_id) is source
    event()
    target = TRANSITIONS[source, cause]
    if (source, cause) in DRAINED_TOO:
        target = TRANSITIONS[target, DRAINED_TOO[source, cause]]
    assert phase_of(world, sequence_id) is target


@pytest.mark.parametrize("edge", [edge for edge in product(Phase, Cause) if edge not in TRANSITIONS], ids=str)
def test_no_other_edge_exists(edge):
    with pytest.raises(SchedulerError, match="cannot"):
        next_phase(*edge)


def test_every_phase_can_be_reached_and_left():
    assert set(TRANSITIONS.values()) == set(Phase) - {Phase.NEW}
    assert {source for source, _ in TRANSITIONS} == set(Phase) - {Phase.FINISHED}


def phase_of(world, sequence_id):
    if sequence_id in world.finished:
        return Phase.FINISHED
    sequence = find(world.state.waiting, sequence_id) or world.sequence(sequence_id)
    return sequence.phase if sequence else Phase.NEW
