"""What goes into a step."""

from pagedjax.core.effects import RunStep
from tests.core.world import World


def lengths(plan):
    return [(row.sequence_id, row.length) for row in plan.rows]


def test_blocks_are_taken_on_demand():
    world = World(block_size=4)
    world.arrive(3, max_tokens=7)
    plans = [world.step() for _ in range(7)]
    assert [row.start + row.length for plan in plans for row in plan.rows] == [3, 4, 5, 6, 7, 8, 9]
    assert [len(row.blocks) for plan in plans for row in plan.rows] == [1, 1, 2, 2, 2, 2, 3]


def test_the_last_sampled_token_is_never_computed():
    world = World()
    world.arrive(5, max_tokens=4)
    world.run()
    assert world.num_computed == 5 + 4 - 1


def test_a_long_prompt_is_computed_in_chunks_under_the_budget():
    world = World(max_num_batched_tokens=8)
    world.arrive(20)
    plans = [world.step() for _ in range(4)]
    assert [row.length for plan in plans for row in plan.rows] == [8, 8, 4, 1]
    assert [row.samples for plan in plans for row in plan.rows] == [False, False, True, True]


def test_decodes_take_their_tokens_before_any_prompt_though_it_ranks_higher():
    world = World(max_num_batched_tokens=8)
    talker = world.arrive(5, max_tokens=9)
    world.step()
    long = world.arrive(30, priority=-1)
    assert lengths(world.step()) == [(talker, 1), (long, 7)]


def test_a_long_prompt_never_stalls_those_that_decode():
    world = World(max_num_batched_tokens=8, max_num_seqs=4)
    talkers = [world.arrive(2, max_tokens=20) for _ in range(3)]
    world.step()
    world.arrive(40)
    for _ in range(8):
        assert [row.sequence_id for row in world.step().rows][:3] == talkers


def test_one_step_mixes_decodes_chunks_and_new_requests_up_to_the_budget():
    world = World(max_num_batched_tokens=12)
    world.arrive(4, max_tokens=9)
    world.step()
    world.arrive(15)
    world.step()
    world.arrive(20)
    plan = world.step()
    assert lengths(plan) == [(0, 1), (1, 4), (2, 7)]
    assert plan.num_tokens == 12


def test_without_chunked_prefill_a_prompt_waits_until_a_step_holds_it_whole():
    world = World(enable_chunked_prefill=False, max_num_batched_tokens=24, max_model_len=24)
    world.arrive(14)
    world.arrive(14)
    assert lengths(world.step()) == [(0, 14)]
    assert lengths(world.step()) == [(0, 1), (1, 14)]


def test_without_chunked_prefill_everything_still_finishes():
    world = World(enable_chunked_prefill=False, max_num_batched_tokens=24, max_model_len=24, num_blocks=8)
    ids = [world.arrive(9, max_tokens=12) for _ in range(6)]
    world.run()
    assert world.preempted
    assert sorted(world.finished) == ids
    assert all(row.samples for effect in world.effects(RunStep) for row in effect.plan.rows)


def test_a_step_is_planned_while_the_one_before_it_is_in_flight():
    world = World(async_scheduling=True)
    world.arrive(5)
    first, second, third = world.due(), world.due(), world.due()
    assert [(row.start, row.length) for row in (*first.rows, *second.rows)] == [(0, 5), (5, 1)]
    assert third is None


def test_without_async_scheduling_a_step_is_planned_only_when_nothing_is_in_flight():
    world = World(async_scheduling=False)
    world.arrive(5)
    world.due()
    assert world.due() is None
    world.done()
    assert world.due() is not None


def test_a_sequence_whose_last_token_is_being_sampled_is_left_out_of_the_next_step():
    world = World(async_scheduling=True)
    world.arrive(5, max_tokens=1)
    assert world.due() is not None
    assert world.due() is None
    world.done()
    assert world.finished[0] == "length"


def test_with_nothing_to_do_nothing_is_planned():
    world = World()
    assert world.due() is None
    assert world.state.next_plan_id == 0


def test_plans_are_numbered_in_order():
    world = World(async_scheduling=True)
    world.arrive(5, max_tokens=5)
    world.run()
    assert [effect.plan.plan_id for effect in world.effects(RunStep)] == list(range(5))
