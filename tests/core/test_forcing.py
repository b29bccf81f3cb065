"""Tokens that are forced behind a sampled one: accepted with it, computed in chunks, sampled by nobody."""

import pytest

from pagedjax.core.errors import SchedulerError
from pagedjax.core.events import StepDone
from pagedjax.core.plan import RowResult
from pagedjax.core.scheduler import update
from tests.core.test_planning import lengths
from tests.core.test_tenants import service_of
from tests.core.world import World


class Forcing(World):
    """So many tokens are forced behind the first one of each output."""

    num_forced = 4

    def _num_forced(self, sequence_id, token):
        return self.num_forced if len(self.output(sequence_id)) == 1 else 0


def shape(plan):
    (row,) = plan.rows
    return row.start, row.length, row.samples


def test_forced_tokens_are_computed_in_one_chunk_which_samples_the_next():
    world = Forcing()
    world.arrive(5, max_tokens=9)
    plans = [world.step() for _ in range(3)]
    assert [shape(plan) for plan in plans] == [(0, 5, True), (5, 1 + 4, True), (10, 1, True)]


def test_a_row_in_flight_whose_token_was_forced_gives_nothing_and_the_chunk_follows_it():
    world = Forcing(async_scheduling=True)
    world.arrive(5, max_tokens=9)
    plans = [world.due(), world.due()]
    world.done()
    plans.append(world.due())
    assert [shape(plan) for plan in plans] == [(0, 5, True), (5, 1, True), (6, 4, True)]
    assert len(world.output(0)) == 1 + 4
    world.done()
    assert len(world.output(0)) == 1 + 4
    world.run()
    assert len(world.output(0)) == 9


def test_a_long_run_goes_in_chunks_behind_those_that_decode():
    world = Forcing(max_num_batched_tokens=8)
    world.num_forced = 0
    talker = world.arrive(2, max_tokens=20)
    world.step()
    world.num_forced = 17
    other = world.arrive(3, max_tokens=20)
    world.step()
    assert [lengths(world.step()) for _ in range(4)] == [
        [(talker, 1), (other, 7)],
        [(talker, 1), (other, 7)],
        [(talker, 1), (other, 4)],
        [(talker, 1), (other, 1)],
    ]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_forced_token_costs_as_much_as_a_sampled_one(ahead):
    world = Forcing(async_scheduling=ahead)
    world.arrive(5, max_tokens=9)
    world.run()
    assert service_of(world) == 5 + 2 * 9


@pytest.mark.parametrize("ahead", [True, False])
def test_a_run_may_be_the_end(ahead):
    world = Forcing(async_scheduling=ahead)
    world.arrive(5, max_tokens=4)
    world.run()
    assert (len(world.output(0)), world.finished[0]) == (4, "length")
    assert service_of(world) == 5 + 2 * 4


@pytest.mark.parametrize("method", ["swap", "recompute"])
def test_a_run_takes_blocks_from_others_and_gives_way_like_a_prompt(method):
    world = Forcing(num_blocks=8, num_host_blocks=8, preemption_method=method, async_scheduling=True)
    world.num_forced = 9
    for _ in range(3):
        world.arrive(4, max_tokens=14)
    world.run()
    assert world.preempted
    assert [len(world.output(i)) for i in range(3)] == [14] * 3
    assert service_of(world) == 3 * (4 + 2 * 14)


def ahead_by_a_run():
    """A step is in flight that ends with the first one's run, which leaves it 4 tokens to go, and a beam's prompt."""
    world = Forcing(async_scheduling=True)
    world.arrive(5, max_tokens=9)
    world.due()
    world.due()
    world.arrive(5, max_tokens=9, beam=True)
    world.done()
    world.due()
    world.done()
    return world


@pytest.mark.parametrize(
    ("complaint", "results"),
    [
        ("cannot accept 5 tokens", (RowResult(0, 5), RowResult(1, 0))),
        ("cannot accept 5 tokens", (RowResult(0, 5, "length"), RowResult(1, 0))),
        ("cannot accept 2 tokens", (RowResult(0, 1), RowResult(1, 2))),
    ],
)
def test_a_run_beyond_max_tokens_or_of_a_beam_is_impossible(complaint, results):
    world = ahead_by_a_run()
    (plan,) = world.state.in_flight
    assert lengths(plan) == [(0, 4), (1, 5)]
    with pytest.raises(SchedulerError, match=complaint):
        update(world.state, StepDone(plan.plan_id, results, 99))


def test_a_row_whose_token_is_known_cannot_give_another():
    world = Forcing(async_scheduling=True)
    world.arrive(5, max_tokens=9)
    world.due()
    world.due()
    world.done()
    with pytest.raises(SchedulerError, match="cannot accept 1 tokens"):
        update(world.state, StepDone(1, (RowResult(0, 1),), 99))
