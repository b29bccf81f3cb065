"""Ragged attention as a Pallas Triton kernel: the portable GPU path, and the second backend of the dispatch.

Algorithm: FlashAttention-2 (arXiv:2307.08691) over block tables. Grid (query tile, KV head). A tile is `tile_q` tokens
of one row with the heads of a KV group packed behind each token, so one product serves them all: decode tiles hold one
token, prefill tiles up to `tile_q`. It walks the row's context up to its last position, `tile_kv` tokens at a time,
each token's block looked up in the table, with the online softmax in registers.

Bytes: K and V of a row's context once per query tile and KV head, q and out once. Limits: Triton wants powers of two,
so head_dim is padded in registers only, block_size must be one; group at most 64; float32, bfloat16, float16. The
writing of K and V is XLA's scatter, in place under donation. Pallas Triton is deprecated in JAX and may go: then
`refuse` says so.

Masked lanes: a slot past the row's length reads nothing, so NaN there can't spread; padding tiles run no iteration.
"""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.kv_blocks import KVBlocks, block_bytes, init_blocks, write_slots
from pallas_kernels.ragged_attention.interface import AttentionBackend, AttentionNeed, AttentionShape, Ragged
from pallas_kernels.ragged_attention.pieces import Pieces
from pallas_kernels.ragged_attention.tiles import TritonTiles, triton_tiles

try:
    from jax.experimental.pallas import triton as plt
except ImportError:  # a JAX that has dropped it
    plt = None

# Said at each lowering; `refuse` is how the project finds out.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)

MASKED = -1e30
DTYPES = ("float32", "bfloat16", "float16")


def refuse_interpreted(need: AttentionNeed) -> str | None:
    """Why the kernel can't take these shapes anywhere, or None."""
    shape = need.shape
    group = shape.num_heads // shape.num_kv_heads
    if plt is None:
        return f"JAX {jax.__version__} has no Pallas Triton any more"
    if need.dtype.name not in DTYPES:
        return f"dtype {need.dtype.name} is not one of {', '.join(DTYPES)}"
    if shape.block_size & (shape.block_size - 1) or not 8 <= shape.block_size <= 64:
        return f"block_size {shape.block_size} is not a power of two from 8 to 64"
    if shape.head_dim > 256:
        return f"head_dim {shape.head_dim} is above 256: a tile would not fit the registers"
    if group > 64:
        return f"{group} heads share a KV head, more than the 64 that a tile packs"
    if need.variant.parts():
        return f"it has no {', no '.join(x.removeprefix('a ') for x in need.variant.parts())}"
    return None


def refuse(need: AttentionNeed) -> str | None:
    """Why the compiled kernel can't run there, or None."""
    if need.platform not in ("gpu", "cuda", "rocm"):
        return f"Triton compiles for GPUs only, and this platform is {need.platform}"
    return refuse_interpreted(need)


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
    interpret: bool = False,
) -> tuple[jax.Array, KVBlocks]:
    """See `AttentionBackend`; `max_q_len` saves nothing. Raises NotImplementedError for what `refuse` refuses."""
    if (window, softcap, sinks, cache.k_scale) != (None,) * 4:
        raise NotImplementedError("this Triton kernel attends plainly only")
    num_tokens, kv_heads, head_dim = k.shape
    shape = AttentionShape(q.shape[1], kv_heads, head_dim, cache.k.shape[3])
    cache = KVBlocks(*(_write(c, x, ragged.slots, layer) for c, x in zip(cache, (k, v))))
    tiles = triton_tiles(shape)
    grouped = _grouped(q, kv_heads, tiles)
    out = _tiled(grouped, cache, ragged, scale, layer, tiles, head_dim, interpret)
    out = out[:, :num_tokens, : q.shape[1] // kv_heads, :head_dim].transpose(1, 0, 2, 3).reshape(q.shape)
    # No tile covers padding tokens: their output was never written.
    real = jnp.arange(num_tokens) < ragged.q_starts[-1]
    return jnp.where(real[:, None, None], out, jnp.zeros((), q.dtype)), cache


def attend_interpreted(*args: Any, **options: Any) -> tuple[jax.Array, KVBlocks]:
    """`attend` run by Pallas' interpreter, on any platform: slow, for tests."""
    return attend(*args, **options, interpret=True)


def _write(cached: jax.Array, values: jax.Array, slots: jax.Array, layer: int | jax.Array) -> jax.Array:
    num_blocks, num_layers, kv_heads, block_size, head_dim = cached.shape
    inside = (slots >= 0) & (slots < num_blocks * block_size)
    # The flat slot of each of a token's KV heads, [tokens, kv_heads].
    heads = ((slots // block_size * num_layers + layer) * kv_heads)[:, None] + jnp.arange(kv_heads)
    flat = jnp.where(inside[:, None], heads * block_size + (slots % block_size)[:, None], -1)
    values = values.reshape(-1, head_dim)
    return write_slots(cached.reshape(-1, head_dim), values, flat.reshape(-1)).reshape(cached.shape)


def _grouped(q: jax.Array, kv_heads: int, tiles: TritonTiles) -> jax.Array:
    """q as [kv_heads, tokens + tile_q, group, head_dim], group and head_dim padded to powers of two with zeros."""
    num_tokens, heads, head_dim = q.shape
    group = heads // kv_heads
    pads = ((0, tiles.tile_q), (0, 0), (0, tiles.group - group), (0, tiles.head_dim - head_dim))
    return jnp.pad(q.reshape(num_tokens, kv_heads, group, head_dim), pads).transpose(1, 0, 2, 3)


def _tiled(
    q: jax.Array,
    cache: KVBlocks,
    ragged: Ragged,
    scale: float,
    layer: int | jax.Array,
    tiles: TritonTiles,
    head_dim: int,
    interpret: bool,
) -> jax.Array:
    """Output like q; unwritten where no row's token lies."""
    kv_heads, padded_tokens = q.shape[:2]
    num_tokens, num_rows = padded_tokens - tiles.tile_q, ragged.kv_lens.shape[0]
    q_lens = ragged.q_starts[1:] - ragged.q_starts[:-1]
    pieces = Pieces.of(-(-q_lens // tiles.tile_q))
    # No batch has more tiles: each row rounds up once, and holds a token at least.
    num_tiles = min(num_tokens, num_rows + num_tokens // tiles.tile_q)
    rows, index = pieces.locate(jnp.arange(num_tiles, dtype=jnp.int32))
    starts = jnp.minimum(ragged.q_starts[rows] + index * tiles.tile_q, ragged.q_starts[rows + 1])
    rest = pl.BlockSpec(memory_space=pl.ANY)
    kernel = partial(_kernel, scale=scale, tiles=tiles, head_dim=head_dim, block_size=cache.k.shape[3])
    return pl.pallas_call(
        kernel,
        grid=(num_tiles, kv_heads),
        in_specs=[rest] * 9,
        out_specs=rest,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="ragged_attention",
    )(
        q,
        cache.k,
        cache.v,
        ragged.block_tables,
        rows,
        starts,
        ragged.q_starts[rows + 1],
        ragged.kv_lens[rows],
        jnp.asarray(layer, jnp.int32).reshape(1),
    )


def _kernel(
    q_ref: Any,  # [kv_heads, tokens, group, head_dim]
    k_ref: Any,  # [num_blocks, num_layers, kv_heads, block_size, head_dim]
    v_ref: Any,
    table_ref: Any,  # [rows, max_blocks]
    rows_ref: Any,  # [tiles]
    starts_ref: Any,  # [tiles] first packed token
    ends_ref: Any,  # [tiles] the row's packed tokens end before this one
    kv_lens_ref: Any,  # [tiles] of the tile's row
    layer_ref: Any,  # [1]
    out_ref: Any,  # like q_ref
    *,
    scale: float,
    tiles: TritonTiles,
    head_dim: int,
    block_size: int,
) -> None:
    tile, head = pl.program_id(0), pl.program_id(1)
    row, start, end, kv_len = rows_ref[tile], starts_ref[tile], ends_ref[tile], kv_lens_ref[tile]
    layer = layer_ref[0]
    size = tiles.tile_q * tiles.group
    first_position = kv_len - end + start
    q = q_ref[head, pl.ds(start, tiles.tile_q)].reshape(size, tiles.head_dim)
    positions = first_position + jnp.arange(size) // tiles.group
    columns = jnp.arange(tiles.head_dim)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def step(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, out = state
        keys = i * tiles.tile_kv + jnp.arange(tiles.tile_kv)
        live = keys < kv_len
        blocks = plt.load(table_ref.at[row, jnp.where(live, keys, 0) // block_size])
        blocks = jnp.where(live, blocks, 0)
        inside = live[:, None] & (columns < head_dim)[None]
        where = (blocks[:, None], layer, head, (keys % block_size)[:, None], jnp.minimum(columns, head_dim - 1)[None])
        k = plt.load(k_ref.at[where], mask=inside, other=0.0)  # [tile_kv, head_dim]
        v = plt.load(v_ref.at[where], mask=inside, other=0.0)
        scores = plt.dot(q, k, trans_b=True, precision=precision) * scale  # [size, tile_kv] float32
        scores = jnp.where((keys[None] <= positions[:, None]) & live[None], scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        decay, weights = jnp.exp(peak - new_peak), jnp.exp(scores - new_peak[:, None])
        out = out * decay[:, None] + plt.dot(weights.astype(v.dtype), v, precision=precision)
        return new_peak, total * decay + jnp.sum(weights, axis=1), out

    state = (
        jnp.full((size,), MASKED, jnp.float32),
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size, tiles.head_dim), jnp.float32),
    )
    last = jnp.where(start < end, jnp.minimum(first_position + tiles.tile_q, kv_len), 0)
    _, total, out = lax.fori_loop(0, pl.cdiv(last, tiles.tile_kv), step, state)
    out = out / jnp.where(total > 0, total, 1.0)[:, None]
    out = out.astype(out_ref.dtype).reshape(tiles.tile_q, tiles.group, tiles.head_dim)
    mine = (start + jnp.arange(tiles.tile_q) < end)[:, None, None]
    plt.store(out_ref.at[head, pl.ds(start, tiles.tile_q)], out, mask=jnp.broadcast_to(mine, out.shape))


_KIND = partial(AttentionBackend, init_cache=init_blocks, block_bytes=block_bytes, prefers_decode_programs=True)
BACKEND = _KIND("pallas_triton", attend=attend)
INTERPRETED = _KIND("pallas_triton_interpret", attend=attend_interpreted)
