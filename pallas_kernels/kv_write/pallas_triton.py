"""KV write as a Pallas Triton kernel: one pass that reshapes, quantises where the cache is, and writes in place.

Grid (token tile, KV head): a program reads `tile_t` tokens of one KV head, finds each vector's scale in registers, and
stores vectors and scales at their slots. The cache's leaves are outputs aliased to inputs, so nothing else moves.

Bytes: k and v once, their vectors and scales once. XLA's way quantises into temporaries and scatters four times.
Limits: Triton wants powers of two, so head_dim is padded in registers only; block_size is free here. Slots out of
range are masked off in the kernel.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kv_blocks import LIMITS, KVBlocks, is_quantised
from pallas_kernels.kv_write.interface import KVWriteBackend
from pallas_kernels.kv_write.tiles import WriteTiles, write_tiles
from pallas_kernels.triton import check_offsets, plt, power_of_two


def write(
    k: jax.Array,
    v: jax.Array,
    cache: KVBlocks,
    slots: jax.Array,
    *,
    layer: int | jax.Array = 0,
    tiles: WriteTiles | None = None,
    interpret: bool = False,
) -> KVBlocks:
    """See `KVWriteBackend`. `tiles` are for tests and tuning."""
    num_tokens, kv_heads, _ = k.shape
    tiles = tiles or write_tiles(num_tokens)
    leaves, tree = jax.tree.flatten(cache)
    check_offsets(cache.k)
    operands = (k, v, slots, jnp.asarray(layer, jnp.int32).reshape(1))
    written = pl.pallas_call(
        partial(_kernel, tiles=tiles),
        grid=(pl.cdiv(num_tokens, tiles.tile_t), kv_heads),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (len(operands) + len(leaves)),
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(leaves),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        input_output_aliases={len(operands) + i: i for i in range(len(leaves))},
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps),
        interpret=interpret,
        name="kv_write",
    )(*operands, *leaves)
    return tree.unflatten(written)


def write_interpreted(*args: Any, **options: Any) -> KVBlocks:
    """`write` run by Pallas' interpreter, on any platform: slow, for tests."""
    return write(*args, **options, interpret=True)


def _kernel(k_ref: Any, v_ref: Any, slots_ref: Any, layer_ref: Any, *cache_refs: Any, tiles: WriteTiles) -> None:
    """k_ref, v_ref [tokens, kv_heads, head_dim]; slots_ref [tokens]; layer_ref [1]; the cache's leaves twice."""
    out_refs = cache_refs[len(cache_refs) // 2 :]
    num_tokens, head_dim = k_ref.shape[0], k_ref.shape[2]
    num_blocks, block_size = out_refs[0].shape[0], out_refs[0].shape[3]
    head, layer = pl.program_id(1), layer_ref[0]
    tokens = pl.program_id(0) * tiles.tile_t + jnp.arange(tiles.tile_t)
    columns = jnp.arange(power_of_two(head_dim))
    slots = plt.load(slots_ref.at[tokens], mask=tokens < num_tokens, other=-1)
    is_real = (slots >= 0) & (slots < num_blocks * block_size)
    # Dropped tokens point past the cache, so that even the interpreter leaves every slot alone.
    blocks = jnp.where(is_real, jax.lax.div(slots, block_size), num_blocks)
    offsets = jax.lax.rem(slots, block_size)
    inside = is_real[:, None] & (columns < head_dim)[None]
    for source, out, scale_out in zip((k_ref, v_ref), out_refs[:2], out_refs[2:] or (None, None)):
        x = plt.load(source.at[tokens[:, None], head, columns[None]], mask=inside, other=0.0)
        if scale_out is not None:
            x, scale = _quantise(x, out.dtype)
            plt.store(scale_out.at[blocks, layer, head, offsets], scale, mask=is_real)
        where = (blocks[:, None], layer, head, offsets[:, None], columns[None])
        plt.store(out.at[where], x.astype(out.dtype), mask=inside)


def _quantise(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """`kv_blocks.quantise` in operations that Triton has."""
    assert is_quantised(dtype)
    limit = LIMITS[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=1) * (1 / limit)
    scaled = x * (1 / jnp.where(scale == 0, 1.0, scale))[:, None]
    scaled = jnp.minimum(jnp.maximum(scaled, -limit), limit)
    return (_round(scaled) if jnp.dtype(dtype) == jnp.int8 else scaled), scale


def _round(x: jax.Array) -> jax.Array:
    """Ties to even, as jnp.round does."""
    low = jnp.floor(x)
    rest = x - low
    is_odd = low - 2 * jnp.floor(low / 2) == 1
    return jnp.where((rest > 0.5) | ((rest == 0.5) & is_odd), low + 1, low)


BACKEND = KVWriteBackend("pallas_triton", write)
INTERPRETED = KVWriteBackend("pallas_triton_interpret", write_interpreted)
