"""What happens when blocks run out: who gives way, to whom, and how it comes back."""

import pytest

from pagedjax.core.config import num_blocks_for
from pagedjax.core.effects import Preempt
from pagedjax.core.phases import Phase
from pagedjax.core.policy import given_up, num_blocks_coming
from tests.core.world import World


def crowded(**limits):
    """Three sequences that fill six blocks after five tokens each; at their ninth each wants another one."""
    world = World(num_blocks=6, enable_prefix_caching=False, **limits)
    for _ in range(3):
        world.arrive(4, max_tokens=12)
    return world


def step_until_preempted(world):
    while not world.preempted:
        world.step()


def test_the_lowest_rank_gives_way():
    world = crowded()
    step_until_preempted(world)
    assert (world.running(), world.preempted) == ([0, 1], [2])
    assert [len(s.blocks) for s in world.state.running] == [3, 3]


def test_priority_decides_before_arrival_who_gives_way():
    world = World(num_blocks=6, enable_prefix_caching=False)
    for priority in (3, 0, 0):
        world.arrive(4, max_tokens=12, priority=priority)
    step_until_preempted(world)
    assert world.preempted == [0]


def test_a_sequence_that_nobody_ranks_below_gives_way_itself():
    world = World(num_blocks=5, enable_prefix_caching=False)
    world.arrive(4, max_tokens=14)
    world.arrive(3, max_tokens=14)
    step_until_preempted(world)
    assert world.preempted == [1]
    assert len(world.sequence(0).blocks) == 3


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_blocks", [5, 6, 8])
def test_the_top_ranked_sequence_is_never_preempted(num_blocks, async_scheduling):
    world = World(num_blocks=num_blocks, async_scheduling=async_scheduling)
    for i in range(6):
        world.arrive(1 + i, max_tokens=12, priority=-(i == 3))
    world.run()
    assert world.preempted
    assert 3 not in world.preempted


def test_a_preempted_sequence_keeps_its_place_in_line():
    world = crowded()
    step_until_preempted(world)
    later, urgent, behind = world.arrive(4), world.arrive(4, priority=-1), world.arrive(4, priority=1)
    assert world.waiting() == [urgent, 2, later, behind]


def test_preempted_sequences_line_up_by_rank_whatever_the_order_they_were_preempted_in():
    world = crowded()
    while len(world.preempted) < 2:
        world.step()
    assert world.preempted == [2, 1]
    assert world.waiting() == [1, 2]


def test_a_preempted_sequence_is_computed_again_from_its_first_token():
    world = crowded()
    step_until_preempted(world)
    num_tokens = len(world.tokens[2])
    while world.sequence(2) is None:
        plan = world.step()
    row = plan.rows[-1]
    assert (row.sequence_id, row.start, row.length, row.samples) == (2, 0, num_tokens, True)


def test_the_effect_says_how_many_computed_tokens_are_lost():
    world = crowded()
    step_until_preempted(world)
    assert world.effects(Preempt) == [Preempt(2, 8)]


@pytest.mark.parametrize("num_blocks", range(5, 12))
def test_a_preempted_sequence_resumes_only_with_a_block_of_headroom(num_blocks):
    world = World(num_blocks=num_blocks, enable_prefix_caching=False)
    for i in range(6):
        world.arrive(1 + 3 * i % 8, max_tokens=12)
    num_resumed = 0
    while len(world.finished) < 6:
        waiting, num_free = set(world.waiting()) & set(world.preempted), world.state.pool.num_free
        world.due()
        for sequence in (s for s in world.state.running if s.sequence_id in waiting):
            assert num_blocks_for(min(sequence.num_tokens + 4, sequence.max_len), 4) <= num_free
            num_free -= len(sequence.blocks)
            num_resumed += 1
        world.done()
    assert num_resumed


def test_nobody_is_admitted_in_a_step_that_is_short_of_blocks():
    world = crowded()
    while all(len(world.tokens[i]) < 9 for i in range(3)):
        world.step()
    world.arrive(1, max_tokens=1)  # would fit beside the two that stay
    world.step()
    assert world.preempted == [2]
    assert world.waiting() == [2, 3]


def test_a_victim_that_is_in_flight_gives_its_blocks_when_its_step_is_done():
    world = crowded(async_scheduling=True)
    world.due()
    while world.due() and world.sequence(2).phase is Phase.RUNNING:
        world.done()
    assert (world.sequence(2).phase, world.sequence(2).num_in_flight) == (Phase.YIELDING, 1)
    assert world.preempted == []
    assert world.sequence(0).num_in_flight == 1  # the beneficiary, too, is in the step before only: it sits one out
    world.done()
    assert world.preempted == [2]
    assert [row.sequence_id for row in world.due().rows] == [0, 1]


def test_blocks_that_two_leaving_sequences_share_count_as_coming():
    """Else a third sequence would be preempted for blocks that are on their way."""
    world = World(async_scheduling=True)
    prefix = list(range(8))
    first = world.arrive([*prefix, 1])
    world.due()
    second = world.arrive([*prefix, 2])
    world.due()
    world.abort(first)
    assert num_blocks_coming(given_up(world.state.running), world.state.pool) == 1
    world.abort(second)
    assert num_blocks_coming(given_up(world.state.running), world.state.pool) == 4


def test_outputs_are_the_same_with_preemption_and_without():
    tight, roomy = (World(num_blocks=n, async_scheduling=True) for n in (7, 64))
    for world in (tight, roomy):
        for prompt_len in (3, 9, 4, 6, 1):
            world.arrive(prompt_len, max_tokens=11)
        world.run()
    assert len(tight.preempted) > 3 and not roomy.preempted
    assert tight.tokens == roomy.tokens
    assert tight.finished == roomy.finished


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_pool_barely_large_enough_for_one_is_enough_for_all(async_scheduling):
    world = World(num_blocks=4, max_num_seqs=4, async_scheduling=async_scheduling)
    ids = [world.arrive(5, max_tokens=12) for _ in range(6)]
    bound = world.step_bound()
    assert world.run() <= bound
    assert sorted(world.finished) == ids
