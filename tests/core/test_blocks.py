"""The pool by itself."""

import pytest

from pagedjax.core.blocks import give, make_pool, register, share, take
from pagedjax.core.errors import SchedulerError

NAMES = tuple(bytes([65 + i]) * 32 for i in range(8))


def cached_pool(num_blocks, num_cached):
    """A pool that has given back one table of cached blocks: 0, 1, … of which the deepest is the oldest."""
    pool, blocks = take(make_pool(num_blocks), num_cached)
    pool = register(pool, zip(NAMES, blocks))
    return give(pool, blocks, NAMES[:num_cached])


def test_a_new_pool_is_clean_and_gives_block_0_first():
    pool, blocks = take(make_pool(8), 3)
    assert blocks == (0, 1, 2)
    assert (pool.num_free, len(pool.clean), dict(pool.counts)) == (5, 5, {0: 1, 1: 1, 2: 1})


def test_taking_nothing_changes_nothing():
    pool = make_pool(4)
    same, taken = take(pool, 0)
    assert same is pool
    assert taken == ()


def test_no_more_can_be_taken_than_is_free():
    pool, _ = take(make_pool(4), 3)
    with pytest.raises(SchedulerError, match="2 blocks asked for, 1 free"):
        take(pool, 2)


def test_blocks_without_a_name_come_back_clean():
    pool, blocks = take(make_pool(4), 3)
    pool = give(pool, blocks, ())
    assert (len(pool.clean), len(pool.idle), len(pool.counts)) == (4, 0, 0)


def test_cached_blocks_come_back_idle_and_keep_their_entry():
    pool = cached_pool(4, 3)
    assert (len(pool.clean), len(pool.idle), len(pool.counts)) == (1, 3, 0)
    assert [pool.cached[name] for name in NAMES[:3]] == [0, 1, 2]


def test_a_named_block_whose_entry_another_block_has_comes_back_clean():
    pool, blocks = take(make_pool(4), 2)
    pool = register(pool, [(NAMES[0], blocks[0]), (NAMES[0], blocks[1])])
    pool = give(pool, blocks[1:], NAMES[:1])
    assert (pool.cached[NAMES[0]], len(pool.idle), len(pool.clean)) == (blocks[0], 0, 3)


def test_clean_blocks_go_before_idle_ones_and_the_deepest_idle_one_before_the_others():
    pool, blocks = take(cached_pool(4, 3), 2)
    assert blocks == (3, 2)
    assert sorted(pool.cached) == sorted(NAMES[:2])


def test_a_shared_idle_block_is_held_again_and_cannot_be_evicted():
    pool = share(cached_pool(4, 3), (0, 1))
    assert (dict(pool.counts), pool.num_free) == ({0: 1, 1: 1}, 2)
    pool, blocks = take(pool, 2)
    assert blocks == (3, 2)


def test_every_holder_must_give_a_block_before_it_is_free():
    pool, blocks = take(make_pool(4), 1)
    pool = share(share(pool, blocks), blocks)
    for num_free in (3, 3, 4):
        pool = give(pool, blocks, ())
        assert pool.num_free == num_free


def test_a_block_that_nobody_holds_cannot_be_given():
    with pytest.raises(KeyError):
        give(make_pool(4), (2,), ())


def test_holes_in_the_idle_queue_are_skipped():
    pool = share(cached_pool(5, 5), (4, 2))
    pool, blocks = take(pool, 3)
    assert blocks == (3, 1, 0)
    pool = give(pool, (0,), NAMES[:1])
    assert pool.num_free == 1


def test_a_block_that_becomes_idle_after_all_others_were_evicted_can_be_evicted():
    pool, blocks = take(cached_pool(3, 3), 3)
    pool = give(register(pool, zip(NAMES, blocks)), blocks, NAMES[:3])
    assert pool.idle_head <= min(pool.idle)
    pool, again = take(pool, 3)
    assert again == blocks[::-1]


def test_the_old_pool_is_unchanged():
    pool = make_pool(4)
    take(pool, 4)
    assert pool == make_pool(4)
