"""The paged cache as all attention ops see it: blocks of K and V, plain or quantised with a scale a token and KV head.

Quantised means symmetric: with s = max|x| * (1 / 127) (int8) or max|x| * (1 / 448) (float8_e4m3fn), float32, a head's
vector x of one token is kept as x * (1 / s), rounded to the nearest, ties to even. No block is ever requantised, so its
bytes depend on its own tokens only, and can be shared, swapped and compared.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The largest number that each quantised type is used for.
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}
SCALE_DTYPE = jnp.float32


class KVBlocks(NamedTuple):
    """The cache of one layer or of several. Axis 0 of each leaf counts blocks; the rest belongs to the backend.

    Layers lie behind blocks: a block's bytes of all layers are one run, to be moved between memories at once.
    A plain cache has no scales: None is no leaf.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None


def is_quantised(dtype: Any) -> bool:
    """Whether a cache of `dtype` has scales."""
    return jnp.dtype(dtype).name in LIMITS


def block_bytes(block_size: int, num_kv_heads: int, head_dim: int, dtype: Any) -> int:
    """Bytes of one block of one layer where K and V are kept without padding; scales included."""
    scale_bytes = jnp.dtype(SCALE_DTYPE).itemsize if is_quantised(dtype) else 0
    return 2 * block_size * num_kv_heads * (head_dim * jnp.dtype(dtype).itemsize + scale_bytes)


def init_blocks(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any, num_layers: int = 1
) -> KVBlocks:
    """Zeroed K and V, [num_blocks, num_layers, kv_heads, block_size, head_dim] each; of a quantised `dtype` with
    float32 scales [num_blocks, num_layers, kv_heads, block_size]. What a KV head has in a block is one run of bytes.

    The layout of the reference and of all GPU backends.
    """
    shape = (num_blocks, num_layers, num_kv_heads, block_size, head_dim)
    # Four arrays of their own: leaves that share a buffer could not be donated.
    scales = [jnp.zeros(shape[:-1], SCALE_DTYPE) for _ in range(2)] if is_quantised(dtype) else []
    return KVBlocks(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), *scales)


def quantise(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """x [..., head_dim] as `dtype`, and float32 scales [...]. Vectors that hold NaN or infinity get a scale that is
    neither, so that they stay no numbers."""
    limit = LIMITS[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    # Products, since XLA makes them of some divisions, and bits would differ.
    scale = jnp.max(jnp.abs(x), axis=-1) * (1 / limit)
    scaled = jnp.clip(x * (1 / jnp.where(scale == 0, 1.0, scale))[..., None], -limit, limit)
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), scale


def stored_as(k: jax.Array, v: jax.Array, dtype: Any) -> KVBlocks:
    """k and v [tokens, kv_heads, head_dim] as a cache of `dtype` keeps them, with scales [tokens, kv_heads] or none."""
    if not is_quantised(dtype):
        return KVBlocks(k.astype(dtype), v.astype(dtype))
    (k, k_scale), (v, v_scale) = quantise(k, dtype), quantise(v, dtype)
    return KVBlocks(k, v, k_scale, v_scale)


def dequantise(values: jax.Array, scale: jax.Array) -> jax.Array:
    """values [..., head_dim] and scales [...] as float32."""
    return values.astype(jnp.float32) * scale[..., None]


def as_float32(cache: KVBlocks) -> tuple[jax.Array, jax.Array]:
    """K and V of a cache laid out as `init_blocks` does, dequantised."""
    if cache.k_scale is None:
        return cache.k.astype(jnp.float32), cache.v.astype(jnp.float32)
    return dequantise(cache.k, cache.k_scale), dequantise(cache.v, cache.v_scale)


def write_slots(flat: jax.Array, values: jax.Array, slots: jax.Array) -> jax.Array:
    """`flat` [slots, …] with `values` [tokens, …] at `slots`; tokens of slots out of range are dropped."""
    # A negative index would wrap to the end; only one past the end is dropped. Two rows at least, since XLA turns
    # a scatter of one row into a dynamic-update-slice that copies the cache.
    slots = jnp.where(slots < 0, flat.shape[0], slots)
    if slots.shape[0] == 1:
        slots = jnp.concatenate([slots, jnp.full_like(slots, flat.shape[0])])
        values = jnp.concatenate([values, values])
    return flat.at[slots].set(values.astype(flat.dtype), mode="drop")
