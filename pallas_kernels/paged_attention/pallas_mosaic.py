"""Paged decode as a Mosaic GPU kernel for Hopper: TMA, wgmma, one producer and one consumer warpgroup.

Algorithm: Flash-Decoding (FlashAttention-2, arXiv:2307.08691, split over the context). Grid (row, KV head, split). A
program walks the tiles of its part of the row's context: the producer warpgroup gathers a tile's blocks by TMA into a
ring of slots, all on the slot's barrier; the consumer multiplies the heads of the KV group, as the first rows of a
64-row tile, by K, and the weights by V. Rows of the tile past the group hold garbage that never leaves it.

Bytes: K and V of a row's context once, q, and per split one float32 partial output and its log-sum-exp.
Limits: bfloat16 and float16; up to 16 heads a KV head.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import warpgroups as wgs
from pallas_kernels.mosaic.support import plgpu
from pallas_kernels.mosaic.tiles import ROWS, DecodeTiles, decode_tiles, registers
from pallas_kernels.mosaic.warpgroups import Ring, Scores, Softmax


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    layer: int | jax.Array = 0,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int = 1,
    tiles: DecodeTiles | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [rows, heads, head_dim] to cached tokens, by splits of each row's context.

    k and v [num_blocks, layers, kv_heads, block_size, head_dim]. Gives out [rows, num_splits, heads, head_dim]
    (float32, or like q of a single split) and lse [rows, num_splits, heads] float32, natural logarithms; an empty
    split has 0 and -1e30.
    """
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    packed = -(-group // 8) * 8
    tiles = tiles or decode_tiles(head_dim)
    q = q.reshape(rows, kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, packed - group), (0, 0)))
    out_dtype = q.dtype if num_splits == 1 else jnp.float32
    out, lse = plgpu.kernel(
        partial(_kernel, scores=Scores(scale, softcap), window=window, tiles=tiles, interpret=interpret),
        out_type=[
            jax.ShapeDtypeStruct((rows, num_splits, kv_heads, packed, head_dim), out_dtype),
            jax.ShapeDtypeStruct((rows, num_splits, kv_heads, packed), jnp.float32),
        ],
        grid=(rows, num_splits, kv_heads),
        grid_names=("row", "split", "head"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=_scratch(k, out_dtype, tiles, interpret),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpret,
        kernel_name="paged_attention_mosaic",
    )(q, k, v, block_tables, kv_lens, jnp.asarray(layer, jnp.int32).reshape(1))
    out, lse = out[:, :, :, :group], lse[:, :, :, :group]
    return out.reshape(rows, num_splits, heads, head_dim), lse.reshape(rows, num_splits, heads)


def _scratch(k: jax.Array, out_dtype: Any, tiles: DecodeTiles, interpret: Any) -> list[Any]:
    block_size, head_dim = k.shape[3:]
    ring = (
        wgs.shared((tiles.slots, tiles.tile_kv, head_dim), k.dtype),
        plgpu.Barrier(num_barriers=tiles.slots, num_arrivals=tiles.tile_kv // block_size),
        plgpu.Barrier(num_barriers=tiles.slots, num_arrivals=1),
    )
    return [
        wgs.shared((ROWS, head_dim), k.dtype),
        plgpu.Barrier(num_barriers=1),
        *ring,
        *ring,
        plgpu.Barrier(num_barriers=1, num_arrivals=tiles.tile_kv // block_size),
        wgs.shared((ROWS, head_dim), out_dtype),
        plgpu.SMEM((ROWS,), jnp.float32),
        *([wgs.shared((ROWS, tiles.tile_kv), k.dtype)] if interpret else []),
    ]


def _kernel(
    q_ref: Any,  # [rows, kv_heads, packed, head_dim]
    k_ref: Any,  # [num_blocks, layers, kv_heads, block_size, head_dim]
    v_ref: Any,
    table_ref: Any,  # [rows, max_blocks]
    kv_lens_ref: Any,  # [rows]
    layer_ref: Any,  # [1]
    out_ref: Any,  # [rows, splits, kv_heads, packed, head_dim]
    lse_ref: Any,  # [rows, splits, kv_heads, packed]
    q_tile: Any,  # [64, head_dim]
    q_ready: Any,
    k_tiles: Any,
    k_ready: Any,
    k_free: Any,
    v_tiles: Any,
    v_ready: Any,
    v_free: Any,
    landed: Any,
    out_tile: Any,  # [64, head_dim]
    lse_tile: Any,  # [64]
    staged: Any = None,  # [64, tile_kv], interpreted only
    *,
    scores: Scores,
    window: int | None,
    tiles: DecodeTiles,
    interpret: Any,
) -> None:
    row, split, head = lax.axis_index("row"), lax.axis_index("split"), lax.axis_index("head")
    warpgroup = lax.axis_index("warpgroup")
    k_ring, v_ring = Ring(k_tiles, k_ready, k_free), Ring(v_tiles, v_ready, v_free)
    kv_len = kv_lens_ref[row]
    live = (jnp.maximum(kv_len - window, 0) if window else jnp.int32(0), kv_len)
    first, last = _part(live, split, out_ref.shape[1], tiles.tile_kv)

    @pl.when(warpgroup == 0)
    def _consume() -> None:
        plgpu.set_max_registers(registers(1).consumer, action="increase")
        packed = q_ref.shape[2]
        plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_tile.at[pl.ds(0, packed)], q_ready)
        plgpu.barrier_wait(q_ready)

        def step(i: jax.Array, state: Softmax) -> Softmax:
            return _attend(i - first, i, state, q_tile, k_ring, v_ring, staged, live, scores, interpret)

        state = lax.fori_loop(first, last, step, wgs.start(*q_tile.shape))
        out_tile[...] = wgs.normalized(state).astype(out_tile.dtype)
        lse_tile[...] = jnp.where(
            state.total > 0, (state.peak + jnp.log2(jnp.where(state.total > 0, state.total, 1.0))) / wgs.LOG2_E, wgs.MASKED
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, packed)], out_ref.at[row, split, head])
        plgpu.copy_smem_to_gmem(lse_tile.at[pl.ds(0, packed)], lse_ref.at[row, split, head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 1)
    def _produce() -> None:
        plgpu.set_max_registers(registers(1).producer, action="decrease")
        layer, block_size = layer_ref[0], k_ref.shape[3]
        last_block = (kv_len - 1) // block_size

        def index(n: jax.Array) -> tuple[Any, ...]:
            return (jnp.clip(table_ref[row, jnp.minimum(n, last_block)], 0, k_ref.shape[0] - 1), layer, head)

        keys, values = (wgs.Source(x, index, tiles.tile_kv // block_size) for x in (k_ref, v_ref))

        def step(i: jax.Array, _: None) -> None:
            wgs.fill_slot(k_ring, i - first, keys, i)
            wgs.fill_slot_cleared(v_ring, i - first, values, i, live, landed)

        lax.fori_loop(first, last, step, None)
        wgs.wait_till_free(k_ring, last - first)
        wgs.wait_till_free(v_ring, last - first)


def _part(live: tuple[jax.Array, jax.Array], split: jax.Array, num_splits: int, tile_kv: int) -> tuple[Any, Any]:
    """The tiles [first, last) of `split`: equal parts, the last ones shorter or empty."""
    first, last = live[0] // tile_kv, pl.cdiv(live[1], jnp.int32(tile_kv))
    size = pl.cdiv(last - first, jnp.int32(num_splits))
    start = jnp.minimum(first + split * size, last)
    return start, jnp.minimum(start + size, last)


def _attend(
    step: jax.Array,
    tile: jax.Array,
    state: Softmax,
    q: Any,
    k_ring: Ring,
    v_ring: Ring,
    staged: Any,
    live: tuple[jax.Array, jax.Array],
    scores: Scores,
    interpret: Any,
) -> Softmax:
    slots, tile_kv = k_ring.tiles.shape[:2]
    slot = lax.rem(step, jnp.int32(slots))
    first = tile * tile_kv
    plgpu.barrier_wait(k_ring.ready.at[slot])
    product = wgs.products(q, k_ring.tiles.at[slot], tile_kv, interpret)
    plgpu.barrier_arrive(k_ring.free.at[slot])
    positions = first + plgpu.broadcasted_iota(jnp.int32, product.shape, 1, layout=plgpu.Layout.WGMMA)
    seen = (positions >= live[0]) & (positions < live[1])
    state, weights = wgs.advance(state, product, scores, seen, q.dtype)
    plgpu.barrier_wait(v_ring.ready.at[slot])
    out = wgs.weigh(state.out, weights, v_ring.tiles.at[slot], staged, interpret)
    plgpu.barrier_arrive(v_ring.free.at[slot])
    return state._replace(out=out)
