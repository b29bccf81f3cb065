"""Who is let in, when, and who never can be."""

import pytest

from tests.core.world import World


def test_requests_are_admitted_first_come_first_served():
    world = World(max_num_seqs=2)
    for _ in range(4):
        world.arrive(5)
    world.due()
    assert world.running() == [0, 1]
    assert world.waiting() == [2, 3]


def test_a_lower_priority_number_goes_before_all_that_came_earlier():
    world = World(max_num_seqs=2)
    ordinary, urgent, later, urgent_later = (world.arrive(5, priority=p) for p in (0, -3, 0, -3))
    assert world.waiting() == [urgent, urgent_later, ordinary, later]
    world.due()
    assert world.running() == [urgent, urgent_later]


def test_a_slot_that_comes_free_goes_to_the_next_in_line():
    world = World(max_num_seqs=1)
    first, second = world.arrive(5, max_tokens=2), world.arrive(5, max_tokens=2)
    world.step()
    assert world.running() == [first]
    world.step()
    assert first in world.finished
    world.step()
    assert world.running() == [second]


def test_with_one_slot_requests_run_one_after_the_other():
    world = World(max_num_seqs=1, async_scheduling=True)
    for _ in range(5):
        world.arrive(5, max_tokens=3)
    world.run()
    assert list(world.finished) == [0, 1, 2, 3, 4]


def test_without_preemption_a_running_sequence_is_not_displaced_by_one_of_higher_priority():
    world = World(max_num_seqs=1, enable_preemption=False)
    running, urgent = world.arrive(5), None
    world.step()
    urgent = world.arrive(5, priority=-8)
    world.step()
    assert (world.running(), world.waiting()) == ([running], [urgent])


def test_a_request_is_admitted_with_room_for_its_prompt_and_one_block_of_headroom():
    world = World(num_blocks=5)
    world.arrive(8, max_tokens=8)
    world.arrive(8, max_tokens=8)  # holds two blocks of the three that are left
    world.arrive(4, max_tokens=8)  # one is left, but it needs one and one more
    world.due()
    assert (world.running(), world.waiting()) == ([0, 1], [2])


def test_headroom_is_never_more_than_a_request_can_use():
    world = World(num_blocks=4)
    world.arrive(8, max_tokens=8)
    world.arrive(8, max_tokens=1)  # its one token is sampled from the prompt's last; no third block is ever needed
    world.due()
    assert world.running() == [0, 1]


def test_nobody_overtakes_a_request_that_waits_for_blocks():
    world = World(num_blocks=8)
    world.arrive(16, max_tokens=8)
    large, small = world.arrive(16, max_tokens=8), world.arrive(1, max_tokens=1)
    world.due()
    assert world.waiting() == [large, small]


def test_blocks_promised_to_the_later_chunks_of_a_prompt_are_not_given_to_others():
    world = World(num_blocks=10, max_num_batched_tokens=8)
    long = world.arrive(32, max_tokens=4)
    world.step()  # two of its eight blocks are taken
    world.arrive(8, max_tokens=8)
    world.step()
    assert world.running() == [long]


def test_a_request_longer_than_the_model_s_context_is_refused_with_the_numbers():
    world = World(max_model_len=20)
    reject = world.rejected[world.arrive(15, max_tokens=6)]
    assert reject.code == "context_length_exceeded"
    assert all(number in reject.message for number in ("20", "21", "15", "6"))
    assert world.arrive(15, max_tokens=5) not in world.rejected


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers():
    world = World(num_blocks=4)
    reject = world.rejected[world.arrive(13, max_tokens=5)]
    assert reject.code == "prompt_exceeds_kv_cache"
    assert all(number in reject.message for number in ("5 blocks", "13", "5", "has 4"))


def test_a_request_that_fills_the_pool_to_its_last_slot_runs_to_its_end():
    world = World(num_blocks=4)
    largest = world.arrive(13, max_tokens=4)
    world.run()
    assert len(world.output(largest)) == 4


def test_nobody_is_held_up_by_a_request_that_was_refused():
    world = World(num_blocks=4)
    refused, small = world.arrive(60, max_tokens=60), world.arrive(3)
    world.run()
    assert (list(world.rejected), list(world.finished)) == ([refused], [small])


@pytest.mark.parametrize("cap", [{"max_queued_requests": 2}, {"max_queued_tokens": 11}])
def test_a_full_queue_refuses_until_there_is_room_again(cap):
    world = World(max_num_seqs=1, **cap)
    world.arrive(5)
    world.arrive(5)
    reject = world.rejected[world.arrive(5)]
    assert (reject.code, reject.message) == ("queue_full", "The queue is full: 2 requests, 10 tokens.")
    world.step()
    assert world.arrive(5) not in world.rejected


def test_a_prompt_that_no_empty_queue_could_take_is_refused_for_good():
    world = World(max_queued_tokens=11)
    reject = world.rejected[world.arrive(12)]
    assert (reject.code, reject.message) == (
        "prompt_exceeds_queue",
        "The prompt has 12 tokens, and at most 11 may wait.",
    )
    assert world.arrive(11) not in world.rejected
