"""Forks: samples of one prompt, and beams, share blocks until one of them writes. Blocks hold four tokens here."""

import pytest

from pagedjax.core.effects import CopyBlocks, Preempt, RunStep
from pagedjax.core.errors import SchedulerError
from pagedjax.core.events import StepDone
from pagedjax.core.plan import Fork, RowResult
from pagedjax.core.scheduler import update
from tests.core.world import World


def sampled(prompt_len, num_samples, max_tokens=8, **limits):
    """So many samples of one prompt, all of which can run at once."""
    world = World(**({"num_blocks": 128, "max_num_seqs": num_samples} | limits))
    first = world.arrive(prompt_len, max_tokens=max_tokens)
    for _ in range(num_samples - 1):
        world.arrive_as_fork(first)
    return world


def most_blocks(world):
    """The most blocks that were ever held, until nobody is left."""
    most = 0
    while world.state.running or world.state.waiting.places:
        if world.due() is None or len(world.state.in_flight) == world.state.config.max_steps_in_flight:
            world.done()
        most = max(most, len(world.state.pool.counts))
    return most


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(9, 8), (10, 11), (11, 6), (12, 9), (8, 4), (3, 10), (1, 4)])
def test_n_samples_hold_the_full_blocks_of_their_prompt_once(prompt_len, max_tokens, caching, async_scheduling):
    n, size = 8, 4
    world = sampled(prompt_len, n, max_tokens, enable_prefix_caching=caching, async_scheduling=async_scheduling)
    shared = prompt_len // size
    most = shared + n * (-(-(prompt_len + max_tokens) // size) - shared)
    # The last sampled token is never computed, so a sequence needs a block less where that alone would start one.
    least = shared + n * (-(-(prompt_len + max_tokens - 1) // size) - shared)
    assert least <= most_blocks(world) <= most
    assert sorted(world.finished.values()) == ["length"] * n


def test_the_prompt_is_computed_once():
    world = sampled(20, 8, max_tokens=2)
    world.run()
    # Each other sample runs the prompt's last token again, for its logits, and its own first token.
    assert world.num_computed == 20 + 1 + 7 * 2


def test_samples_of_one_prompt_differ():
    world = sampled(9, 4)
    world.run()
    assert len({tuple(world.output(i)) for i in range(4)}) == 4


def test_the_first_row_of_a_sample_writes_nothing_and_its_second_copies_the_tail_first():
    world = sampled(6, 2)
    world.step()
    rows = world.step().rows
    assert [(row.sequence_id, row.start, row.writes) for row in rows] == [(0, 6, True), (1, 5, False)]
    assert rows[0].blocks == rows[1].blocks
    world.step()
    effects = world.log[-2][1]
    (copied,) = [effect for effect in effects if isinstance(effect, CopyBlocks)]
    ((source, target),) = copied.pairs
    assert source == rows[0].blocks[1]
    assert isinstance(effects[-1], RunStep)
    (own,) = [row.blocks for row in effects[-1].plan.rows if target in row.blocks]
    assert own[0] == rows[0].blocks[0]


def test_the_last_one_who_holds_a_tail_writes_in_place():
    world = sampled(5, 3)
    world.run()
    assert sum(len(effect.pairs) for effect in world.effects(CopyBlocks)) == 2


def test_a_prompt_that_ends_with_its_block_needs_no_copy():
    world = sampled(8, 4)
    world.run()
    assert not world.effects(CopyBlocks)


def test_a_sample_whose_first_one_is_gone_takes_what_the_prefix_cache_has():
    world = World(max_num_seqs=1)
    first = world.arrive(9, max_tokens=2)
    second = world.arrive_as_fork(first)
    world.run()
    assert world.finished == {first: "length", second: "length"}
    (row,) = [row for effect in world.effects(RunStep) for row in effect.plan.rows if row.sequence_id == second][:1]
    assert row.start == 8


def test_samples_are_the_same_whether_they_share_or_wait():
    together, apart = sampled(6, 4, max_num_seqs=4), sampled(6, 4, max_num_seqs=1)
    together.run()
    apart.run()
    assert together.tokens == apart.tokens


@pytest.mark.parametrize("host", [0, 20])
@pytest.mark.parametrize("num_blocks", [6, 8, 11])
def test_samples_are_the_same_when_they_crowd_each_other_out(num_blocks, host):
    roomy, tight = sampled(6, 5, 9), sampled(6, 5, 9, num_blocks=num_blocks, num_host_blocks=host)
    roomy.run()
    tight.run()
    assert tight.effects(Preempt)
    assert tight.tokens == roomy.tokens


def test_an_abort_of_one_sample_leaves_the_others_alone():
    world = sampled(6, 4)
    for _ in range(3):
        world.step()
    world.abort(0)
    world.run()
    assert list(world.finished.values()).count("length") == 3
    assert world.state.pool.num_free == world.state.pool.num_blocks


def beams(**limits):
    """A beam that has just sampled the first token of two, and the event that forks it."""
    world = World(**limits)
    parent = world.arrive(5, max_tokens=6, beam=True)
    world.due()
    return world, parent


def test_a_beam_waits_for_its_token_to_be_confirmed():
    world, _ = beams(async_scheduling=True)
    assert world.due() is None
    world.done()
    assert world.due() is not None


def test_a_fork_goes_on_where_its_parent_is_with_a_token_of_its_own():
    world, parent = beams()
    plan = world.state.in_flight[0]
    state, effects = update(
        world.state, StepDone(plan.plan_id, (RowResult(parent, 1, children=(Fork(7), Fork(8))),), 99)
    )
    assert effects == ()
    first, *others = state.running
    assert [s.sequence_id for s in others] == [7, 8]
    assert {s.blocks for s in others} == {first.blocks}
    assert [(s.num_tokens, s.num_computed) for s in others] == [(6, 5), (6, 5)]
    assert state.pool.counts[first.blocks[-1]] == 3


def test_forks_may_take_their_parent_s_place():
    world, parent = beams(max_num_seqs=2)
    plan = world.state.in_flight[0]
    children = (Fork(7), Fork(8))
    state, effects = update(world.state, StepDone(plan.plan_id, (RowResult(parent, 0, "stop", (), children),), 99))
    assert [s.sequence_id for s in state.running] == [7, 8]
    assert [effect.sequence_id for effect in effects] == [parent]


def test_forks_without_a_slot_get_in_line():
    world, parent = beams(max_num_seqs=2)
    plan = world.state.in_flight[0]
    state, effects = update(
        world.state, StepDone(plan.plan_id, (RowResult(parent, 1, children=(Fork(7), Fork(8))),), 99)
    )
    assert [s.sequence_id for s in state.running] == [parent, 7]
    assert effects == (Preempt(8, 5, "recompute", "slots"),)


@pytest.mark.parametrize(
    ("complaint", "result"),
    [
        ("is here already", RowResult(0, 1, children=(Fork(0),))),
        ("full blocks", RowResult(0, 1, children=(Fork(7, (b"x" * 32,)),))),
    ],
)
def test_an_impossible_fork_raises(complaint, result):
    world, _ = beams()
    with pytest.raises(SchedulerError, match=complaint):
        update(world.state, StepDone(world.state.in_flight[0].plan_id, (result,), 99))


@pytest.mark.parametrize("num_blocks", [12, 64])
def test_beams_that_fork_all_the_time_end_with_all_blocks_free(num_blocks):
    world = World(fork_every=2, num_blocks=num_blocks, num_host_blocks=6, preemption_method="swap")
    for prompt_len in (3, 6, 9):
        world.arrive(prompt_len, max_tokens=6, beam=True)
    world.run()
    assert len(world.finished) > 6
    assert world.state.pool.num_free == num_blocks
