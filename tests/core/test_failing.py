"""Failed steps: the device loses its cache, and nobody but the guilty is lost with it."""

import pytest

from pagedjax.core.effects import Finish, Preempt
from pagedjax.core.errors import SchedulerError
from pagedjax.core.events import StepFailed
from pagedjax.core.phases import Phase
from pagedjax.core.scheduler import update
from tests.core.test_swapping import assert_all_free, landing, phase, step_until, swapping_out, yielding_again
from tests.core.world import World


def busy(num_sequences=4, **limits):
    world = World(async_scheduling=True, max_num_seqs=4, **limits)
    for i in range(num_sequences):
        world.arrive(5 + i, max_tokens=6)
    world.due()
    world.done()
    world.due()
    world.due()
    return world


@pytest.mark.parametrize("suspects", [(), (1,), (0, 3)], ids=str)
def test_a_failed_step_loses_nobody(suspects):
    failed, spared = busy(), busy()
    failed.fail(*suspects)
    failed.run()
    spared.run()
    assert failed.tokens == spared.tokens
    assert failed.finished == spared.finished


def test_every_plan_in_flight_is_void_and_every_block_clean():
    world = busy()
    assert len(world.state.in_flight) == 2
    effects = world.fail()
    state = world.state
    assert not state.in_flight and not state.pending and not state.running
    assert len(state.pool.clean) == state.pool.num_blocks and not state.pool.cached
    assert {(type(effect), effect.reason) for effect in effects} == {(Preempt, "failure")}


def test_suspects_are_tried_alone_one_after_the_other_and_then_all_go_on():
    world = busy()
    world.fail(1, 2)
    rows = [[row.sequence_id for row in world.step().rows] for _ in range(3)]
    assert rows[:2] == [[1], [2]]
    assert set(rows[2]) == {0, 1, 2, 3}
    assert world.state.suspects == ()


def test_without_named_suspects_every_row_of_the_plan_is_one():
    world = busy()
    world.fail()
    assert world.state.suspects == (0, 1, 2, 3)


def test_unnamed_suspects_are_tried_one_by_one_in_as_few_steps_as_each_one_s_tokens_take():
    world = World(max_num_seqs=4, max_num_batched_tokens=8)
    for prompt_len in (5, 12, 6):
        world.arrive(prompt_len, max_tokens=6)
    for _ in range(4):
        world.step()
    world.due()
    world.fail()
    bystander = world.arrive(4, max_tokens=2)
    lens = [len(world.tokens[i]) for i in range(3)]
    num_steps = [-(-length // 8) for length in lens]
    rows = [[row.sequence_id for row in world.step().rows] for _ in range(sum(num_steps) + 1)]
    assert rows[:-1] == [[i] for i, num in enumerate(num_steps) for _ in range(num)]
    assert bystander in rows[-1] and len(rows[-1]) > 1


@pytest.mark.parametrize("prompt_len", [5, 30])
def test_whoever_fails_alone_too_ends_with_an_error(prompt_len):
    world = World(async_scheduling=True, max_num_seqs=4, max_num_batched_tokens=8)
    others = [world.arrive(4, max_tokens=8) for _ in range(2)]
    bad = world.arrive(prompt_len, max_tokens=4)
    others.append(world.arrive(4, max_tokens=8))
    world.poison.add(bad)
    world.run()
    assert world.finished[bad] == "error"
    assert [world.finished[i] for i in others] == ["length"] * 3
    assert all(len(world.output(i)) == 8 for i in others)


def test_two_guilty_ones_are_both_found():
    world = World(max_num_seqs=5)
    ids = [world.arrive(4, max_tokens=6) for _ in range(5)]
    world.poison.update((ids[1], ids[3]))
    world.run()
    assert [world.finished[i] for i in ids] == ["length", "error", "length", "error", "length"]


def test_a_suspect_that_has_no_room_yet_holds_up_nobody():
    """Those who were suspects before it run on, and hold the blocks that it needs."""
    world = World(num_blocks=5, max_num_seqs=3)
    first, second = world.arrive(8, max_tokens=5), world.arrive(6, max_tokens=5)
    world.due()
    world.fail(first, second)
    world.run()
    assert world.finished == {first: "length", second: "length"}


def test_an_abort_ends_a_suspect():
    world = busy()
    world.fail(1, 2)
    world.abort(1)
    assert world.state.suspects == (2,)
    world.run()


def test_a_sequence_that_had_ended_is_gone_with_the_failure():
    world = busy()
    world.abort(2)
    assert world.sequence(2).phase is Phase.ABORTING
    assert Finish(2, "abort") in world.fail()


def test_what_a_lower_tier_has_survives():
    world, sequence_id = yielding_again()
    world.fail()
    assert phase(world, sequence_id) is Phase.SWAPPED
    num_kept = len(world.state.tiers.parked[sequence_id].copies)
    world.abort(0)
    for other in list(world.tokens):
        if other != sequence_id:
            world.abort(other)
    step_until(world, lambda: world.sequence(sequence_id) is not None)
    while world.state.tiers.transfers:
        world.transfer()
    row = world.due().rows[0]
    assert row.start == num_kept * 4
    world.run()
    assert_all_free(world)


@pytest.mark.parametrize("make", [swapping_out, landing])
def test_transfers_outlive_a_failed_step(make):
    world, sequence_id = make()
    other = world.arrive(4, max_tokens=3)
    step_until(world, lambda: world.state.in_flight, world.due)
    world.fail()
    world.run()
    assert world.finished[other] == world.finished[sequence_id] == "length"
    assert_all_free(world)


def test_a_failure_of_a_plan_that_is_not_in_flight_raises():
    world = busy()
    with pytest.raises(SchedulerError, match="plan 77 is not in flight"):
        update(world.state, StepFailed(77, (), 99))
