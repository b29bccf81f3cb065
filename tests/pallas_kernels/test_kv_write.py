"""Every backend of KV write against plain numpy: bits, dropped tokens, and the cache's place in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_blocks import init_blocks
from pallas_kernels.kv_write import pallas_triton, reference, xla
from pallas_kernels.kv_write.shapes import SHAPES
from pallas_kernels.kv_write.tiles import WriteTiles
from tests.pallas_kernels.cases import quantised
from tests.pallas_kernels.decodes import fresh_rng

BACKENDS = [reference.BACKEND, xla.BACKEND, pallas_triton.INTERPRETED]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda x: x.name)
NUM_BLOCKS, LAYERS, LAYER = 12, 2, 1
REDUCED = [(min(shape[0], 40), *shape[1:]) for shape in SHAPES]


def poisoned(block_size, kv_heads, head_dim, dtype):
    """A cache whose every number is NaN, or 77 where a type has none."""
    cache = init_blocks(NUM_BLOCKS, block_size, kv_heads, head_dim, dtype, LAYERS)
    return jax.tree.map(lambda x: jnp.full_like(x, 77 if x.dtype == jnp.int8 else jnp.nan), cache)


def make(shape, dtype):
    """k, v [2, tokens, kv_heads, head_dim] and distinct slots, of which some are none."""
    num_tokens, kv_heads, head_dim, block_size, _ = shape
    rng = fresh_rng()
    kv = rng.standard_normal((2, num_tokens, kv_heads, head_dim)) * rng.lognormal(0, 3, (2, num_tokens, 1, 1))
    kv = np.clip(kv, -6e4, 6e4)  # what float16 holds
    kv[:, 0, 0] = 0
    slots = rng.permutation(NUM_BLOCKS * block_size)[:num_tokens]
    slots[3::7] = -1
    slots[5::11] = NUM_BLOCKS * block_size + rng.integers(0, 100)
    return jnp.asarray(kv, dtype), jnp.asarray(slots, jnp.int32)


def expected(kv, slots, cache, kv_dtype):
    leaves = [np.array(x) for x in jax.tree.leaves(cache)]
    values = [np.asarray(x) for x in kv]
    if kv_dtype is not None:
        values, scales = zip(*(quantised(x, kv_dtype) for x in values))
        values = [*values, *scales]
    block_size = leaves[0].shape[3]
    for leaf, x in zip(leaves, values):
        for token, slot in enumerate(np.asarray(slots)):
            if 0 <= slot < NUM_BLOCKS * block_size:
                leaf[slot // block_size, LAYER, :, slot % block_size] = x[token]
    return leaves


def assert_equal_bits(got, wanted):
    for a, b in zip(jax.tree.leaves(got), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), b.view(np.uint8))


@backends
@pytest.mark.parametrize("shape", REDUCED, ids=str)
def test_tokens_go_to_their_slots_and_nothing_else_changes(backend, shape):
    _, kv_heads, head_dim, block_size, kv_dtype = shape
    (k, v), slots = make(shape, "bfloat16")
    cache = poisoned(block_size, kv_heads, head_dim, kv_dtype or "bfloat16")
    got = jax.jit(backend.write)(k, v, cache, slots, layer=jnp.int32(LAYER))
    assert_equal_bits(got, expected((k, v), slots, cache, kv_dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
def test_the_kernel_takes_any_type_and_tile(dtype, kv_dtype):
    shape = (11, 3, 20, 8, kv_dtype)
    (k, v), slots = make(shape, dtype)
    cache = poisoned(8, 3, 20, kv_dtype or dtype)
    got = pallas_triton.write_interpreted(k, v, cache, slots, layer=LAYER, tiles=WriteTiles(8, 1))
    assert_equal_bits(got, expected((k, v), slots, cache, kv_dtype))


@backends
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_vectors_that_are_no_numbers_stay_so(backend, kv_dtype):
    cache = init_blocks(2, 8, 1, 16, kv_dtype)
    k = jnp.ones((3, 1, 16)).at[0, 0, 3].set(jnp.nan).at[1, 0, 5].set(-jnp.inf)
    got = backend.write(k, k, cache, jnp.arange(3, dtype=jnp.int32))
    with np.errstate(invalid="ignore"):
        kept = np.asarray(got.k[0, 0, 0, :3], np.float32) * np.asarray(got.k_scale[0, 0, 0, :3])[:, None]
    assert not np.isfinite(kept[:2]).any()
    np.testing.assert_allclose(kept[2], 1, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS[1:], ids=lambda x: x.name)
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_the_cache_is_written_in_place_under_donation(backend, kv_dtype):
    cache = init_blocks(NUM_BLOCKS, 8, 2, 16, kv_dtype)
    write = jax.jit(backend.write, donate_argnums=2)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    for start in (0, 3):
        cache = write(*jnp.ones((2, 3, 2, 16)), cache, jnp.arange(start, start + 3, dtype=jnp.int32))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)] == pointers
