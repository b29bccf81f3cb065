"""Every backend of block copy against plain numpy: bits, padding, and the cache's place in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_copy import backend_for, loop, pallas_triton, reference, staging_for

NUM_BLOCKS = 12
DTYPES = ("float32", "bfloat16", "uint16", "float8_e4m3fn")
# Bytes that make no NaN, whose bits the definition may change on CPUs; XLA before JAX 0.11 does so in a loop too.
NO_NAN = 0x3F
FROM_0_11 = 0xFF if jax.__version_info__ >= (0, 11) else NO_NAN
HIGHEST = {reference.BACKEND: NO_NAN, loop.BACKEND: FROM_0_11, pallas_triton.INTERPRETED: NO_NAN}
backends = pytest.mark.parametrize("backend", HIGHEST, ids=lambda x: x.name)
caches_of = pytest.mark.parametrize("dtypes", [(x, x) for x in DTYPES] + [("int8", "float32")], ids="-".join)


def make_caches(dtypes, num_blocks=NUM_BLOCKS, seed=0, highest=255):
    """Leaves of random bytes (NaN of all kinds among them), each with another shape behind axis 0."""
    rng = np.random.default_rng(seed)
    shapes = [(num_blocks, 3, 4, 6), (num_blocks, 5)]
    bits = [
        rng.integers(0, highest, (*shape[:-1], shape[-1] * jnp.dtype(x).itemsize), np.uint8, endpoint=True)
        for shape, x in zip(shapes, dtypes)
    ]
    return tuple(jnp.asarray(x.view(jnp.dtype(dtype))) for x, dtype in zip(bits, dtypes))


def raw(caches):
    """[blocks, bytes]: what each block holds in all leaves."""
    return np.concatenate([np.asarray(x).view(np.uint8).reshape(x.shape[0], -1) for x in caches], axis=1)


def ids(*values):
    return jnp.array(values, jnp.int32)


@backends
@caches_of
def test_gathered_rows_are_the_blocks_bits_and_padding_is_zero(backend, dtypes):
    caches = make_caches(dtypes, highest=HIGHEST[backend])
    staging = jax.jit(backend.gather)(caches, ids(7, -1, 0, NUM_BLOCKS, 11))
    assert (staging.shape, staging.dtype) == (staging_for(caches, 5).shape, staging_for(caches, 5).dtype)
    expected = raw(caches)[[7, 0, 0, 0, 11]]
    expected[[1, 3]] = 0
    np.testing.assert_array_equal(np.asarray(staging).view(np.uint8), expected)


@backends
@caches_of
@pytest.mark.parametrize("targets", [(5,), (3, -1, 0, NUM_BLOCKS + 3, 11)])
def test_scattered_rows_become_blocks_and_others_stay(backend, dtypes, targets):
    old, other = make_caches(dtypes, highest=HIGHEST[backend]), make_caches(dtypes, seed=1, highest=HIGHEST[backend])
    expected = raw(old)
    for row, target in enumerate(targets):
        if 0 <= target < NUM_BLOCKS:
            expected[target] = raw(other)[row]
    staging = backend.gather(other, jnp.arange(len(targets), dtype=jnp.int32))
    np.testing.assert_array_equal(raw(jax.jit(backend.scatter)(old, staging, ids(*targets))), expected)


@backends
@caches_of
def test_copied_blocks_are_all_read_before_any_is_written(backend, dtypes):
    caches = make_caches(dtypes, highest=NO_NAN)
    expected = raw(caches)
    expected[[1, 2, 8]] = expected[[2, 1, 4]]
    copied = jax.jit(backend.copy)(caches, ids(2, 1, 4, -1, 3), ids(1, 2, 8, 5, -1))
    np.testing.assert_array_equal(raw(copied), expected)


# XLA:CPU copies the cache for a scatter of one row; the loop is there for CPUs.
@pytest.mark.parametrize(
    ("backend", "size"),
    [(loop.BACKEND, 1), (loop.BACKEND, 4), (reference.BACKEND, 4)],
    ids=["one", "four", "reference"],
)
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("uint16",) * 2])
def test_the_cache_stays_in_place_and_costs_no_more_as_it_grows(backend, size, dtypes):
    block_ids = jnp.arange(size, dtype=jnp.int32)
    temporaries = []
    for num_blocks in (64, 512):
        caches = make_caches(dtypes, num_blocks)
        staging = backend.gather(caches, block_ids)
        scatter = jax.jit(backend.scatter, donate_argnums=0).lower(caches, staging, block_ids).compile()
        copy = jax.jit(backend.copy, donate_argnums=0).lower(caches, block_ids, block_ids).compile()
        temporaries.append([x.memory_analysis().temp_size_in_bytes for x in (scatter, copy)])
        before = [leaf.unsafe_buffer_pointer() for leaf in caches]
        for _ in range(2):
            caches = copy(scatter(caches, staging, block_ids), block_ids, block_ids)
        assert [leaf.unsafe_buffer_pointer() for leaf in caches] == before
    assert temporaries[0] == temporaries[1]


def test_types_without_whole_words_are_refused():
    with pytest.raises(NotImplementedError, match="float64"):
        staging_for([jax.ShapeDtypeStruct((4, 2), np.float64)], 1)


def test_cpus_loop_gpus_have_a_kernel_and_others_index():
    assert backend_for("cpu") is loop.BACKEND
    assert backend_for("gpu") is pallas_triton.BACKEND
    assert backend_for("tpu") is reference.BACKEND
