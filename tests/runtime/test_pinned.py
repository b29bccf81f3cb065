"""Blocks in pinned memory: what was written last comes back, and the pool stays within its size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.runtime import pinned
from pagedjax.runtime.pinned import PinnedPool

NUM_BLOCKS, WORDS = 20, 6
BLOCK_BYTES = 2 * WORDS


@pytest.fixture
def pool():
    return PinnedPool(NUM_BLOCKS, BLOCK_BYTES, jax.devices()[0])


def staging(rows, size):
    values = np.zeros((size, WORDS), np.uint16)
    values[: len(rows)] = rows
    return jnp.asarray(values)


def test_blocks_lie_in_pinned_memory(pool):
    pool.keep(staging(np.ones((3, WORDS)), 4), (5, 6, 7))
    (batch,) = pool._batches()
    assert batch.array.sharding.memory_kind == "pinned_host"
    assert pool.bring((5, 6, 7), 4).sharding.memory_kind == jax.devices()[0].default_memory().kind


def test_what_was_written_last_comes_back_whatever_was_written_with_it(pool):
    rng, expected = np.random.default_rng(0), {}
    for _ in range(200):
        size = int(rng.choice([1, 4, 16]))
        num_blocks = int(rng.integers(size // 2 + 1, size + 1))
        block_ids = rng.permutation(NUM_BLOCKS)[:num_blocks].tolist()
        rows = rng.integers(0, 2**16, (num_blocks, WORDS), np.uint16)
        pool.keep(staging(rows, size), tuple(block_ids))
        expected |= dict(zip(block_ids, rows))
        assert pool.held_bytes <= NUM_BLOCKS * BLOCK_BYTES
        wanted = rng.permutation(list(expected))[: rng.integers(1, 9)].tolist()
        found = np.asarray(pool.bring(tuple(wanted), 16))
        np.testing.assert_array_equal(found[: len(wanted)], [expected[i] for i in wanted])
    assert len(expected) == NUM_BLOCKS


def test_a_batch_that_comes_back_as_it_went_is_not_touched_by_the_host(pool, monkeypatch):
    pool.keep(staging(np.arange(3 * WORDS).reshape(3, WORDS), 4), (8, 2, 5))
    monkeypatch.setattr(pool, "_gathered", None)
    assert np.asarray(pool.bring((8, 2, 5), 4))[2, 0] == 2 * WORDS
    with pytest.raises(TypeError):
        pool.bring((2, 8, 5), 4)


def test_more_than_is_free_is_refused_with_the_flag(monkeypatch):
    monkeypatch.setattr(pinned, "free_host_bytes", lambda: 100)
    with pytest.raises(ConfigError, match="--swap-space"):
        PinnedPool(NUM_BLOCKS, BLOCK_BYTES, jax.devices()[0])
