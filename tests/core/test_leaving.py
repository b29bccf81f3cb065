"""Finishing and aborting, from every phase: when the caller hears of it and when the blocks are back."""

import pytest

from pagedjax.core.effects import Finish
from pagedjax.core.phases import Phase
from tests.core.world import World


def test_a_sequence_finishes_with_its_last_token():
    world = World()
    world.arrive(5, max_tokens=2)
    world.step()
    world.due()
    assert world.done() == (Finish(0, "length"),)
    assert world.state.pool.num_free == world.state.pool.num_blocks


def test_a_stop_found_late_costs_one_discarded_token():
    world = World(async_scheduling=True, stop_every=1)
    world.arrive(5, max_tokens=9)
    world.run()
    assert world.finished[0] == "stop"
    assert (len(world.output(0)), world.num_discarded) == (1, 1)


def test_without_async_scheduling_no_token_is_discarded():
    world = World(async_scheduling=False, stop_every=1)
    world.arrive(5, max_tokens=9)
    world.run()
    assert (len(world.output(0)), world.num_discarded) == (1, 0)


def test_the_last_token_by_length_is_never_found_late():
    world = World(async_scheduling=True)
    for prompt_len in (1, 4, 5, 9):
        world.arrive(prompt_len, max_tokens=3)
    world.run()
    assert world.num_discarded == 0


def test_blocks_of_a_sequence_that_stopped_are_kept_until_its_last_step_is_done():
    world = World(async_scheduling=True, stop_every=1)
    world.arrive(5, max_tokens=9)
    world.due()
    world.due()
    assert world.done() == ()
    assert world.sequence(0).phase is Phase.FINISHING
    assert world.state.pool.num_free < world.state.pool.num_blocks
    assert world.done() == (Finish(0, "stop"),)
    assert world.state.pool.num_free == world.state.pool.num_blocks


def waiting():
    world = World(max_num_seqs=1)
    world.arrive(5)
    world.step()
    return world, world.arrive(5)


def running():
    world = World()
    world.arrive(5)
    world.step()
    return world, 0


def in_flight():
    world = World()
    world.arrive(5)
    world.due()
    return world, 0


def in_flight_twice():
    world = World(async_scheduling=True)
    world.arrive(5)
    world.due()
    world.due()
    return world, 0


def in_the_middle_of_its_prompt():
    world = World(max_num_batched_tokens=8, async_scheduling=True)
    world.arrive(30)
    world.due()
    return world, 0


def yielding():
    world = World(num_blocks=6, enable_prefix_caching=False, async_scheduling=True)
    for _ in range(3):
        world.arrive(4, max_tokens=12)
    world.due()
    while world.due() and world.sequence(2).phase is Phase.RUNNING:
        world.done()
    return world, 2


def preempted():
    world, sequence_id = yielding()
    world.done()
    assert world.preempted == [sequence_id]
    return world, sequence_id


def aborting():
    world, sequence_id = in_flight_twice()
    world.abort(sequence_id)
    return world, sequence_id


MAKERS = [waiting, running, in_flight, in_flight_twice, in_the_middle_of_its_prompt, yielding, preempted, aborting]


@pytest.mark.parametrize("make", MAKERS)
def test_an_abort_ends_a_sequence_from_every_phase_and_its_blocks_come_back(make):
    world, sequence_id = make()
    world.abort(sequence_id)
    num_steps = len(world.state.in_flight)
    while sequence_id not in world.finished:
        world.done()
    assert world.finished[sequence_id] == "abort"
    assert num_steps <= 2
    world.run()
    assert len(world.finished) == len(world.tokens)
    assert world.state.pool.num_free == world.state.pool.num_blocks


@pytest.mark.parametrize("make", [waiting, running, preempted])
def test_with_no_step_in_flight_that_contains_it_an_aborted_sequence_is_gone_at_once(make):
    world, sequence_id = make()
    assert Finish(sequence_id, "abort") in world.abort(sequence_id)


@pytest.mark.parametrize("make", [in_flight, in_flight_twice, in_the_middle_of_its_prompt, yielding])
def test_an_aborted_sequence_is_in_no_later_plan(make):
    world, sequence_id = make()
    world.abort(sequence_id)
    while sequence_id not in world.finished:
        plan = world.due()
        assert plan is None or sequence_id not in [row.sequence_id for row in plan.rows]
        world.done()


def test_an_abort_after_the_end_changes_nothing():
    world = World(async_scheduling=True, stop_every=1)
    world.arrive(5, max_tokens=9)
    world.due()
    world.due()
    world.done()
    assert world.sequence(0).phase is Phase.FINISHING
    world.abort(0)
    world.done()
    assert world.finished[0] == "stop"
    assert world.abort(0) == ()
    assert len(world.finished) == 1


def test_the_blocks_that_an_aborted_sequence_computed_stay_in_the_cache():
    world = World()
    world.arrive([1, 2, 3, 4, 5])
    world.step()
    world.abort(0)
    world.arrive([1, 2, 3, 4, 6])
    assert world.step().rows[0].start == 4


def test_many_aborts_in_one_step_leave_the_others_alone():
    world = World(async_scheduling=True, max_num_seqs=4)
    ids = [world.arrive(5, max_tokens=6) for _ in range(8)]
    world.due()
    for sequence_id in ids[::2]:
        world.abort(sequence_id)
    world.run()
    assert [world.finished[i] for i in ids] == ["abort", "length"] * 4
