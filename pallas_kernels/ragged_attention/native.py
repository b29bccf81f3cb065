"""Ragged attention in C++ for CPUs, called through XLA's FFI: `pallas_kernels/native/attention.h` tells how it works.

Layout: K and V as [num_blocks, num_layers, kv_heads, block_size * padded head_dim], tiled inside (attention.h); half
precision as bits, unsigned ones of bfloat16 and signed ones of float16, since XLA:CPU of JAX 0.10 converts half
precision to float32 and back around any move. q, k and v may be of another type than the cache. In int8 (`kv_blocks`)
a token's scales lie in leaves of their own, [num_blocks, num_layers, kv_heads, block_size].

The handler writes K and V into the cache that it reads, so the call aliases the cache's input and output: XLA copies
the cache first where the caller's jit does not donate it. Sums are float32; a bfloat16 cache takes queries and weights
rounded to bfloat16 where the machine multiplies these. A query's bits depend on its own context alone, not on the
batch, the chunks or the threads. Limits: head_dim up to 256, block sizes that are multiples of 8 from 8 to 64.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.kv_blocks import SCALE_DTYPE, is_quantised
from pallas_kernels.ragged_attention.interface import (
    AttentionBackend,
    AttentionNeed,
    AttentionVariant,
    KVBlocks,
    Ragged,
)

TARGET = "pagedjax_ragged_attention"
STORED = {"float32": jnp.float32, "bfloat16": jnp.uint16, "float16": jnp.int16, "int8": jnp.int8}
GIVEN = ("float32", "bfloat16", "float16")


def refuse(need: AttentionNeed) -> str | None:
    """Why the kernel can't run there, or None."""
    shape = need.shape
    if need.platform != "cpu":
        return f"it runs on CPUs, and this platform is {need.platform}"
    if need.dtype.name not in GIVEN:
        return f"dtype {need.dtype.name} is not one of {', '.join(GIVEN)}"
    if shape.block_size % 8 or not 8 <= shape.block_size <= 64:
        return f"block_size {shape.block_size} is not a multiple of 8 from 8 to 64"
    if shape.head_dim > 256:
        return f"head_dim {shape.head_dim} is above 256"
    return _lacking(need.variant) or native.unavailable()


def _lacking(variant: AttentionVariant) -> str | None:
    if variant.kv_dtype == "int8":
        variant = replace(variant, kv_dtype=None)
    return f"it has no {', no '.join(x.removeprefix('a ') for x in variant.parts())}" if variant.parts() else None


def init_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any, num_layers: int = 1
) -> KVBlocks:
    """K and V, [num_blocks, num_layers, kv_heads, numbers] each, and scales where quantised, of numbers that nobody has
    written yet: any at all."""
    native.load()
    heads = (num_blocks, num_layers, num_kv_heads)
    stored = STORED[jnp.dtype(dtype).name]
    shapes = [jax.ShapeDtypeStruct((*heads, block_size * dim), stored) for dim in padded(head_dim)]
    if is_quantised(dtype):
        shapes += [jax.ShapeDtypeStruct((*heads, block_size), SCALE_DTYPE)] * 2
    return KVBlocks(*jax.jit(jax.ffi.ffi_call("pagedjax_untouched", shapes))())


def block_bytes(block_size: int, num_kv_heads: int, head_dim: int, dtype: Any) -> int:
    """Bytes of one block of one layer, padding and scales included."""
    scale_bytes = 2 * jnp.dtype(SCALE_DTYPE).itemsize if is_quantised(dtype) else 0
    return block_size * num_kv_heads * (sum(padded(head_dim)) * jnp.dtype(dtype).itemsize + scale_bytes)


def padded(head_dim: int) -> tuple[int, int]:
    """Dimensions that K and V take in the cache: whole pairs, and whole vectors of 16."""
    return head_dim + head_dim % 2, -(-head_dim // 16) * 16


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVBlocks,
    ragged: Ragged,
    *,
    scale: float,
    layer: int | jax.Array = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    max_q_len: int | None = None,
) -> tuple[jax.Array, KVBlocks]:
    """See `AttentionBackend`; `max_q_len` saves nothing, as the work follows the rows.

    Raises NotImplementedError for what `refuse` refuses, and NativeUnavailable where there is no library.
    """
    lacking = _lacking(AttentionVariant(window is not None, softcap is not None, sinks is not None))
    if lacking is not None:
        raise NotImplementedError(f"native attention: {lacking}")
    qkv = jnp.concatenate([q, k.astype(q.dtype), v.astype(q.dtype)], axis=1)
    return _call(qkv, (_NONE, _NONE), cache, ragged, scale, layer)


def attend_turned(
    qkv: jax.Array,
    turns: tuple[jax.Array, jax.Array],
    cache: KVBlocks,
    ragged: Ragged,
    *,
    scale: float,
    layer: int | jax.Array = 0,
) -> tuple[jax.Array, KVBlocks]:
    """See `AttentionBackend`. Raises NativeUnavailable where there is no library."""
    return _call(qkv, turns, cache, ragged, scale, layer)


_NONE = np.zeros(0, np.float32)


def _call(
    qkv: jax.Array, turns: tuple[Any, Any], cache: KVBlocks, ragged: Ragged, scale: float, layer: int | jax.Array
) -> tuple[jax.Array, KVBlocks]:
    native.load()
    num_tokens, num_heads, head_dim = qkv.shape
    attended = jax.ShapeDtypeStruct((num_tokens, num_heads - 2 * cache.k.shape[2], head_dim), qkv.dtype)
    leaves = [leaf for leaf in cache if leaf is not None]
    outputs = [attended, *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)]
    inputs = (
        *(qkv, *turns, ragged.block_tables, ragged.q_starts, ragged.kv_lens, ragged.slots),
        jnp.asarray(layer, jnp.int32),
    )
    aliases = {len(inputs) + i: 1 + i for i in range(len(leaves))}
    out, *new = jax.ffi.ffi_call(TARGET, outputs, input_output_aliases=aliases)(
        *inputs,
        *leaves,
        block_size=np.int32(cache.k.shape[-1] // padded(head_dim)[0]),
        scale=np.float32(scale),
    )
    return out, KVBlocks(*new)


BACKEND = AttentionBackend("native", init_cache, block_bytes, attend, joins_layers=True, attend_turned=attend_turned)
