"""Prefix caching: what is shared, when it may be read, and what is evicted first. Blocks hold four tokens here."""

import pytest

from pagedjax.core.effects import Preempt
from pagedjax.core.prefix import max_prefix_blocks
from tests.core.world import World

PREFIX = list(range(10, 18))  # two blocks


def only_row(plan):
    (row,) = plan.rows
    return row


def test_a_finished_request_s_blocks_are_shared_by_one_with_the_same_prefix():
    world = World()
    world.arrive([*PREFIX, 1, 2], max_tokens=1)
    first = only_row(world.step())
    world.arrive([*PREFIX, 3, 4])
    second = only_row(world.step())
    assert (second.start, second.length) == (8, 2)
    assert second.blocks[:2] == first.blocks[:2]
    assert world.sequence(1).num_cached == 8


@pytest.mark.parametrize(("prompt_len", "num_cached"), [(7, 4), (8, 4), (9, 8)])
def test_the_last_token_is_never_taken_from_the_cache(prompt_len, num_cached):
    prompt = [*PREFIX, 1][:prompt_len]
    world = World()
    for _ in range(2):
        world.arrive(prompt, max_tokens=1)
        row = only_row(world.step())
    assert row.start == num_cached == max_prefix_blocks(prompt_len, 4) * 4


def test_equal_blocks_behind_different_ones_are_not_shared():
    world = World()
    world.arrive([1, 2, 3, 4, *PREFIX, 5], max_tokens=1)
    world.step()
    world.arrive([4, 3, 2, 1, *PREFIX, 5], max_tokens=1)
    assert only_row(world.step()).start == 0


def test_blocks_enter_the_cache_only_when_their_step_is_done():
    world = World()
    world.arrive([*PREFIX, 1])
    world.due()
    assert not world.state.pool.cached
    world.done()
    assert len(world.state.pool.cached) == 2


def test_blocks_being_computed_are_read_by_the_next_step_before_the_first_is_done():
    world = World(async_scheduling=True)
    world.arrive([*PREFIX, 1], max_tokens=2)
    first = only_row(world.due())
    world.arrive([*PREFIX, 2], max_tokens=2)
    second = world.due().rows[-1]
    assert (second.sequence_id, second.start, second.blocks[:2]) == (1, 8, first.blocks[:2])
    world.run()


def test_a_pending_prefix_outlives_the_abort_of_the_one_that_computes_it():
    world = World(async_scheduling=True, num_blocks=6)
    owner = world.arrive([*PREFIX, 1])
    world.due()
    reader = world.arrive([*PREFIX, 2])
    world.due()
    world.abort(owner)
    world.run()  # the device checks what the reader reads
    assert (world.finished[owner], world.finished[reader]) == ("abort", "length")


def test_a_burst_with_one_prefix_computes_it_once():
    world = World(
        block_size=16,
        num_blocks=256,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=1024,
        async_scheduling=True,
    )
    prefix = list(range(512))
    for i in range(64):
        world.arrive([*prefix, 1000 + i, 1000, 1000], max_tokens=2)
    world.run()
    assert world.num_computed == 512 + 64 * (3 + 1)


def test_who_is_passed_over_until_its_prefix_is_there_holds_up_nobody():
    world = World()
    owner, reader, other = world.arrive([*PREFIX, 1]), world.arrive([*PREFIX, 2]), world.arrive(5)
    assert [row.sequence_id for row in world.step().rows] == [owner, other]
    assert reader in [row.sequence_id for row in world.step().rows]


def test_a_second_block_with_the_same_contents_stays_private():
    world = World()
    world.arrive(PREFIX)
    world.arrive(PREFIX)  # its last block holds its last token, so it computes that block again
    world.step()
    world.step()
    first, second = world.sequence(0).blocks, world.sequence(1).blocks
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert set(first[:2]) <= set(world.state.pool.cached.values())
    assert second[1] not in world.state.pool.cached.values()


def test_generated_blocks_are_cached_for_the_next_turn_of_a_conversation():
    world = World()
    turn = world.arrive(PREFIX, max_tokens=6)
    world.run()
    world.arrive([*world.tokens[turn], 1, 2, 3], max_tokens=1)
    assert only_row(world.step()).start == 12


def test_the_least_recently_used_blocks_are_evicted_first_and_the_deepest_of_them_before_the_others():
    world = World(num_blocks=6)
    old, recent = world.arrive(8, max_tokens=1), world.arrive(8, max_tokens=1)
    world.run()
    world.arrive(12, max_tokens=1)  # two blocks are clean; the third is taken from the cache
    world.step()
    cached = world.state.pool.cached
    assert [name in cached for name in world.names(old)] == [True, False]
    assert [name in cached for name in world.names(recent)] == [True, True]


def test_a_hit_makes_blocks_recently_used():
    world = World(num_blocks=6)
    renewed, old = world.arrive([*PREFIX, 1], max_tokens=1), world.arrive(8, max_tokens=1)
    world.run()
    world.arrive([*PREFIX, 2], max_tokens=1)
    world.run()
    world.arrive(16, max_tokens=1)  # two clean, two evicted
    world.step()
    assert [name in world.state.pool.cached for name in world.names(old)] == [False, False]
    assert [name in world.state.pool.cached for name in world.names(renewed)] == [True, True]


def test_a_shared_block_comes_free_with_its_last_holder():
    world = World()
    world.arrive([*PREFIX, 1], max_tokens=3)
    world.step()
    world.arrive([*PREFIX, 2], max_tokens=9)
    world.step()
    world.step()
    assert list(world.finished) == [0]
    assert [world.state.pool.counts[b] for b in world.sequence(1).blocks] == [1, 1, 1]


def test_a_preempted_sequence_takes_back_what_the_cache_still_has():
    world = World(num_blocks=7, block_size=2)
    ids = [world.arrive(4, max_tokens=6) for _ in range(3)]
    world.run()
    assert world.preempted
    assert sorted(world.finished) == ids
    num_lost = sum(effect.num_lost_tokens for effect in world.effects(Preempt))
    assert world.num_computed < 3 * (4 + 6 - 1) + num_lost


def test_without_prefix_caching_nothing_is_shared():
    world = World(enable_prefix_caching=False)
    for _ in range(2):
        world.arrive([*PREFIX, 1], max_tokens=4)
        world.run()
    assert world.num_computed == 2 * (9 + 3)
    assert len(world.state.pool.clean) == world.state.pool.num_blocks
