"""Paged decode as a Mosaic GPU kernel for Hopper: TMA, wgmma, one producer and one consumer warpgroup.

Algorithm: Flash-Decoding (FlashAttention-2, arXiv:2307.08691, split over the context). Grid (piece, KV head). A program
walks the tiles of a piece of a row's context: the producer warpgroup gathers a tile's blocks by TMA into a ring of
slots, all on the slot's barrier; the consumer multiplies the heads of the KV group, as the first rows of a 64-row tile,
by K, and the weights by V. Rows of the tile past the group hold garbage that never leaves it.

The step's lengths cut the contexts into pieces on the device (`cuts`), so that one row of 32k tokens fills the chip as
64 rows of 4k do; the Triton backend's last kernel combines the pieces. A table too short to be worth it is not cut.

Bytes: K and V of a context once, q, and per piece a float32 output, written and read. Limits: `support.refuse_shape`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention import AttentionNeed
from pallas_kernels.kv_blocks import KVBlocks
from pallas_kernels.mosaic import support
from pallas_kernels.mosaic import warpgroups as wgs
from pallas_kernels.mosaic.support import plgpu
from pallas_kernels.mosaic.tiles import ROWS, DecodeTiles, decode_tiles, registers
from pallas_kernels.mosaic.warpgroups import Ring, Scores, Softmax
from pallas_kernels.paged_attention import pallas_triton as paged_triton
from pallas_kernels.paged_attention.cuts import Cuts, cut
from pallas_kernels.paged_attention.interface import PagedBackend
from pallas_kernels.triton import plt


def refuse(need: AttentionNeed) -> str | None:
    """Why the compiled kernel can't run there, or None."""
    return support.refuse_device(need.platform, need.capability) or refuse_interpreted(need)


def refuse_interpreted(need: AttentionNeed) -> str | None:
    """Why the kernel can't take these shapes anywhere, or None."""
    return support.api_gap() or support.refuse_shape(need)


def attend(
    q: jax.Array,
    cache: KVBlocks,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    layer: int | jax.Array = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    tiles: DecodeTiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `PagedBackend`. `tiles` are for tests and tuning."""
    tiles = tiles or decode_tiles(q.shape[2])
    firsts = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)
    rows = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    is_split = block_tables.shape[1] * cache.k.shape[3] > 2 * tiles.min_piece
    cuts = cut((firsts, kv_lens), cache.k.shape[2], tiles) if is_split else Cuts(rows, firsts, kv_lens, rows)
    options = {"out_dtype": jnp.float32 if is_split else q.dtype, "tiles": tiles, "interpret": interpret}
    out, log = attend_pieces(q, cache, block_tables, cuts, layer, Scores(scale, softcap), **options)
    if is_split:
        return _combined((out, log), q, cuts, sinks, interpret)
    if sinks is not None:
        out = (out * _share(log, sinks)[..., None]).astype(q.dtype)
    return jnp.where(kv_lens[:, None, None] > 0, out, jnp.zeros((), q.dtype))


def attend_interpreted(*args: Any, **options: Any) -> jax.Array:
    """`attend` run by the Mosaic GPU interpreter with race detection: slow, for tests."""
    return attend(*args, **options, interpret=support.interpreter())


def _combined(
    parts: tuple[jax.Array, jax.Array], q: jax.Array, cuts: Cuts, sinks: jax.Array | None, interpret: Any
) -> jax.Array:
    """The rows' outputs, like q, by the Triton kernel while JAX has it: one launch a layer, where XLA takes nine."""
    if plt is None:
        return combined_by_xla(parts, cuts, sinks).astype(q.dtype)
    call = partial(pl.pallas_call, interpret=bool(interpret))
    return paged_triton.combined(call, parts, q, sinks, cuts.row_starts, q.shape[0], tile_pieces=16)


def combined_by_xla(parts: tuple[jax.Array, jax.Array], cuts: Cuts, sinks: jax.Array | None) -> jax.Array:
    """The rows' outputs [rows, heads, head_dim] float32, from those of their pieces; zero where a row has none."""
    out, log = parts
    num_rows = cuts.row_starts.shape[0] - 1
    is_piece = cuts.firsts < cuts.ends
    # What was not written may be NaN, and a row that is NaN must not carry over: a product sums over all pieces.
    is_sound = is_piece & jnp.isfinite(jnp.sum(out, axis=(1, 2)))
    out = jnp.where(is_sound[:, None, None], out, 0.0)
    owns = is_piece & (cuts.rows == jnp.arange(num_rows)[:, None])  # [rows, pieces]
    logs = jnp.where(owns[..., None], log, wgs.MASKED)  # [rows, pieces, heads]
    peak = jnp.max(logs, axis=1)
    weights = jnp.where(owns[..., None], jnp.exp2(logs - peak[:, None]), 0.0)
    total = jnp.sum(weights, axis=1)  # [rows, heads]
    total = jnp.where(jnp.any(owns & ~is_sound, axis=1)[:, None], jnp.nan, total)
    summed = jnp.einsum("rph,phd->rhd", weights, out, precision=lax.Precision.HIGHEST)
    summed /= jnp.where(total == 0, 1.0, total)[..., None]
    if sinks is None:
        return summed
    return summed * _share(peak + jnp.log2(jnp.where(total == 0, 1.0, total)), sinks)[..., None]


def _share(log: jax.Array, sinks: jax.Array) -> jax.Array:
    """What a sink [heads] leaves to weights whose sum has the base-2 logarithm `log` [..., heads]."""
    return jax.nn.sigmoid(log / wgs.LOG2_E - sinks)


# Jitted, so that the layers of a model share one lowering of the kernel, which takes a second.
@partial(jax.jit, static_argnames=("scores", "out_dtype", "tiles", "interpret"))
def attend_pieces(
    q: jax.Array,
    cache: KVBlocks,
    block_tables: jax.Array,
    cuts: Cuts,
    layer: int | jax.Array,
    scores: Scores,
    *,
    out_dtype: Any = jnp.float32,
    tiles: DecodeTiles | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [rows, heads, head_dim] to each piece of its row's context.

    Gives out [pieces, heads, head_dim] of `out_dtype`, normalised, and the base-2 logarithms of the weights that it
    was divided by, [pieces, heads] float32. Nothing is written for an empty piece.
    """
    (rows, heads, head_dim), kv_heads, num_pieces = q.shape, cache.k.shape[2], cuts.rows.shape[0]
    group = heads // kv_heads
    packed = -(-group // 8) * 8
    tiles = tiles or decode_tiles(head_dim)
    grouped = jnp.pad(q.reshape(rows, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, packed - group), (0, 0)))
    out, log = plgpu.kernel(
        partial(_kernel, scores=scores, tiles=tiles, interpret=interpret),
        out_type=[
            jax.ShapeDtypeStruct((num_pieces, kv_heads, packed, head_dim), out_dtype),
            jax.ShapeDtypeStruct((num_pieces, kv_heads, packed), jnp.float32),
        ],
        grid=(num_pieces, kv_heads),
        grid_names=("piece", "head"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=_scratch(cache.k, out_dtype, tiles, interpret),
        # No sum of the kernel goes across warps; large heads need the bytes.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpret,
        kernel_name="paged_attention_mosaic",
    )(grouped, cache.k, cache.v, block_tables, *cuts[:3], jnp.asarray(layer, jnp.int32).reshape(1))
    return out[:, :, :group].reshape(num_pieces, heads, head_dim), log[:, :, :group].reshape(num_pieces, heads)


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
    rows_ref: Any,  # [pieces]
    firsts_ref: Any,  # [pieces]
    ends_ref: Any,  # [pieces]
    layer_ref: Any,  # [1]
    out_ref: Any,  # [pieces, kv_heads, packed, head_dim]
    log_ref: Any,  # [pieces, kv_heads, packed]
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
    log_tile: Any,  # [64]
    staged: Any = None,  # [64, tile_kv], interpreted only
    *,
    scores: Scores,
    tiles: DecodeTiles,
    interpret: Any,
) -> None:
    piece, head, warpgroup = lax.axis_index("piece"), lax.axis_index("head"), lax.axis_index("warpgroup")
    k_ring, v_ring = Ring(k_tiles, k_ready, k_free), Ring(v_tiles, v_ready, v_free)
    row, live = rows_ref[piece], (firsts_ref[piece], ends_ref[piece])
    first = live[0] // tiles.tile_kv
    last = pl.cdiv(live[1], jnp.int32(tiles.tile_kv))
    is_piece = live[0] < live[1]

    @pl.when(is_piece & (warpgroup == 0))
    def _consume() -> None:
        plgpu.set_max_registers(registers(1).consumer, action="increase")
        packed = q_ref.shape[2]
        plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_tile.at[pl.ds(0, packed)], q_ready)
        plgpu.barrier_wait(q_ready)

        def step(tile: jax.Array, state: Softmax) -> Softmax:
            return _attend(tile - first, tile, state, q_tile, k_ring, v_ring, staged, live, scores, interpret)

        state = lax.fori_loop(first, last, step, wgs.start(*q_tile.shape))
        _store(state, out_tile, log_tile, out_ref.at[piece, head], log_ref.at[piece, head])

    @pl.when(is_piece & (warpgroup == 1))
    def _produce() -> None:
        plgpu.set_max_registers(registers(1).producer, action="decrease")
        layer, (num_blocks, _, _, block_size, _) = layer_ref[0], k_ref.shape
        last_block = (live[1] - 1) // block_size

        def index(n: jax.Array) -> tuple[Any, ...]:
            return (jnp.clip(table_ref[row, jnp.minimum(n, last_block)], 0, num_blocks - 1), layer, head)

        keys, values = (wgs.Source(x, index, tiles.tile_kv // block_size) for x in (k_ref, v_ref))

        def step(tile: jax.Array, _: None) -> None:
            wgs.fill_slot(k_ring, tile - first, keys, tile)
            wgs.fill_slot_cleared(v_ring, tile - first, values, tile, live, landed)

        lax.fori_loop(first, last, step, None)
        wgs.wait_till_free(k_ring, last - first)
        wgs.wait_till_free(v_ring, last - first)


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


def _store(state: Softmax, out_tile: Any, log_tile: Any, out_ref: Any, log_ref: Any) -> None:
    """The first rows of the tile, as many as out_ref [packed, head_dim] takes, and their weights."""
    packed = out_ref.shape[0]
    out_tile[...] = wgs.normalized(state).astype(out_tile.dtype)
    log_tile[...] = wgs.log_weight(state)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, packed)], out_ref)
    plgpu.copy_smem_to_gmem(log_tile.at[pl.ds(0, packed)], log_ref)
    plgpu.wait_smem_to_gmem(0)


BACKEND = PagedBackend("pallas_mosaic", attend)
INTERPRETED = PagedBackend("pallas_mosaic_interpret", attend_interpreted)
