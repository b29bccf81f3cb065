"""Ragged attention as Pallas Triton kernels: the portable GPU path.

Algorithm, three kernels after one another on one output: `kv_write` puts the step's keys and values into the cache;
`paged_attention` serves the leading decode rows; a FlashAttention-2 kernel (arXiv:2307.08691) over block tables serves
the chunks. Its grid is (query tile, KV head): a tile packs the heads of a KV group behind each of `tile_q` tokens of
one row, so that one product serves them all, and walks the row's context up to its own last position; whole tiles
below all its queries go unmasked, then the causal edge, masked. Heavy tiles start first. With `max_q_len` 1, or a
single token, a step has decodes only and the last kernel is left out. Rows of both kinds are told apart by
`num_decode_rows`, a number on the device, so that a step of any mix runs the same program.

Bytes: K and V of a row's context once per query tile and KV head (from L2 mostly, as tiles of a head run side by
side), q and out once. FLOPs: 4 * head_dim a head and (query, key) pair; a tile adds at most one tile_kv of masked ones.
Limits: see `triton.refuse`; head_dim is padded to a power of two in registers only.

Guards: padding tokens and rows of nothing get zeros from tiles of their own; the rest is `walk`'s and `kv_write`'s.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention import AttentionShape, Scoring
from pallas_kernels.kv_blocks import KVBlocks, block_bytes, init_blocks
from pallas_kernels.kv_write import pallas_triton as kv_write
from pallas_kernels.paged_attention import pallas_triton as paged_attention
from pallas_kernels.paged_attention.walk import Context, Walk, columns_of, finished, initial, walk
from pallas_kernels.pieces import Pieces
from pallas_kernels.ragged_attention.interface import AttentionBackend, Ragged
from pallas_kernels.ragged_attention.tiles import PrefillTiles, prefill_tiles
from pallas_kernels.triton import plt, refuse, refuse_interpreted

__all__ = ["BACKEND", "INTERPRETED", "attend", "refuse", "refuse_interpreted"]

_ANY = pl.BlockSpec(memory_space=pl.ANY)


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
    tiles: PrefillTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, KVBlocks]:
    """See `AttentionBackend`. `tiles` are for tests and tuning. `dispatch.choose` asks `refuse` first; here JAX itself
    complains."""
    num_tokens, num_rows = q.shape[0], ragged.kv_lens.shape[0]
    cache = kv_write.write(k, v, cache, ragged.slots, layer=layer, interpret=interpret)
    scoring = Scoring(scale, window, softcap, sinks)
    lens = jnp.where(jnp.arange(num_rows) < ragged.num_decode_rows, ragged.kv_lens, 0)
    only_decodes = max_q_len == 1 or num_tokens == 1
    out = paged_attention.attend_rows(
        q,
        cache,
        (ragged.block_tables, lens),
        scoring,
        layer,
        num_out=num_tokens if only_decodes else min(num_rows, num_tokens),
        interpret=interpret,
    )
    if not only_decodes:
        shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], cache.k.shape[3])
        tiles = tiles or prefill_tiles(shape, q.dtype.itemsize, cache.k_scale is not None)
        out = _prefill(q, out, cache, ragged, scoring, layer, tiles, interpret)
    return out, cache


def attend_interpreted(*args: Any, **options: Any) -> tuple[jax.Array, KVBlocks]:
    """`attend` run by Pallas' interpreter, on any platform: slow, for tests."""
    return attend(*args, **options, interpret=True)


def _prefill(
    q: jax.Array,
    out: jax.Array,
    cache: KVBlocks,
    ragged: Ragged,
    scoring: Scoring,
    layer: int | jax.Array,
    tiles: PrefillTiles,
    interpret: bool,
) -> jax.Array:
    """`out` with the tokens past the decode rows filled in, in place."""
    rows, starts = _tiles_of(ragged, q.shape[0], tiles.tile_q)
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    inputs = (q, out, cache, ragged.block_tables, layers, scoring.sinks, ragged.q_starts, ragged.kv_lens, rows, starts)
    leaves, tree = jax.tree.flatten(inputs)
    how = Walk(scoring.scale, scoring.softcap, tiles.tile_kv, interpret)
    return pl.pallas_call(
        partial(_kernel, tree=tree, how=how, window=scoring.window, tiles=tiles),
        grid=(rows.shape[0], cache.k.shape[2]),
        in_specs=[_ANY] * len(leaves),
        out_specs=_ANY,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={1: 0},
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="ragged_attention",
    )(*leaves)


def _tiles_of(ragged: Ragged, num_tokens: int, tile_q: int) -> tuple[jax.Array, jax.Array]:
    """Row and first token of each query tile, int32: of the rows past the decodes, and of the padding tokens, which
    are the tokens of one row more. Tiles past the end have no token."""
    num_rows = ragged.kv_lens.shape[0]
    ends = jnp.append(ragged.q_starts[1:], num_tokens)
    lengths = ends - ragged.q_starts
    pieces = Pieces.of(jnp.where(jnp.arange(num_rows + 1) < ragged.num_decode_rows, 0, -(-lengths // tile_q)))
    # No step has more: each row rounds up once, and has a token at least.
    num_tiles = min(num_tokens, num_rows + 1 + num_tokens // tile_q)
    # From the last: a row's later tiles see more, and would make the others wait if they started last.
    rows, index = pieces.locate(jnp.arange(num_tiles - 1, -1, -1, dtype=jnp.int32))
    return rows, jnp.minimum(ragged.q_starts[rows] + index * tile_q, ends[rows]).astype(jnp.int32)


def _kernel(*refs: Any, tree: Any, how: Walk, window: int | None, tiles: PrefillTiles) -> None:
    """Refs: the inputs of `_prefill` in their order, then the output [tokens, heads, head_dim]."""
    inputs, out_ref = tree.unflatten(refs[:-1]), refs[-1]
    q_ref, _, cache, table_ref, layer_ref, sinks_ref, q_starts_ref, kv_lens_ref, rows_ref, starts_ref = inputs
    (num_tokens, num_heads, head_dim), num_rows = q_ref.shape, table_ref.shape[0]
    tile, kv_head = pl.program_id(0), pl.program_id(1)
    row, start = rows_ref[tile], starts_ref[tile]
    is_row = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    end = jnp.where(is_row, q_starts_ref[row + 1], num_tokens)
    kv_len = jnp.where(is_row, kv_lens_ref[row], 0)
    context = Context(*cache, table_ref, row, layer_ref[0], kv_head)

    group = num_heads // context.k_ref.shape[2]
    packed, columns = jnp.arange(tiles.size), columns_of(context)
    within = lax.div(packed, group)
    tokens, heads = start + within, kv_head * group + lax.rem(packed, group)
    is_mine = (within < tiles.tile_q) & (tokens < end)
    inside = is_mine[:, None] & (columns < head_dim)[None]
    q = plt.load(q_ref.at[tokens[:, None], heads[:, None], columns[None]], mask=inside, other=0.0)
    sinks = None if sinks_ref is None else plt.load(sinks_ref.at[heads], mask=is_mine, other=0.0)

    first_position = kv_len - end + start
    positions = (first_position + within)[:, None]
    last = jnp.where(start < end, jnp.minimum(first_position + tiles.tile_q, kv_len), 0)
    first = jnp.int32(0) if window is None else jnp.maximum(first_position - window + 1, 0)

    def seen(keys: jax.Array) -> jax.Array:
        causal = keys[None] <= positions
        return causal if window is None else causal & (keys[None] > positions - window)

    state = initial(tiles.size, columns.size, sinks)
    if window is None:  # the keys that all of the tile's queries see
        edge = lax.div(jnp.minimum(first_position + 1, last), how.tile_kv) * how.tile_kv
        state = walk(state, q, context, (first, edge), how, whole=True)
        first = jnp.maximum(edge, 0)
    state = walk(state, q, context, (first, last), how, seen=seen)
    # In the interpreter, lanes of other tiles must not name a place that another lane stores to.
    tokens = jnp.where(is_mine, tokens, num_tokens)
    where = (tokens[:, None], heads[:, None], columns[None])
    plt.store(out_ref.at[where], finished(state).astype(out_ref.dtype), mask=inside)


_KIND = partial(AttentionBackend, init_cache=init_blocks, block_bytes=block_bytes, prefers_decode_programs=True)
BACKEND = _KIND("pallas_triton", attend=attend)
INTERPRETED = _KIND("pallas_triton_interpret", attend=attend_interpreted)
