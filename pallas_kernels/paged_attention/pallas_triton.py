"""Paged attention as Pallas Triton kernels: a split walk and a combine step (Flash-Decoding).

Algorithm: every row's context is cut into equal pieces, whose number the step's lengths decide on the device: about
`num_programs` over all rows and KV heads, so that one row of 32k tokens fills the chip as 64 rows of 4k do, and a long
row among short ones is spread. The first kernel, grid (KV head, piece), walks a piece with the group's queries packed
into one tile of a product, padded to 16, and leaves a normalised output and the base-2 logarithm of its weight. The
second, grid (head, row), weighs a row's pieces. Where the table holds no context worth splitting, one kernel, grid
(KV head, row), does it all.

Bytes: K and V of each context once, q once a piece, outputs once; pieces add 4 * (head_dim + 1) bytes a head and piece,
written and read: 0.4 % at 2k tokens a piece, group 4, head_dim 128, bfloat16. Limits: see `triton.refuse`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention import AttentionShape, Scoring
from pallas_kernels.kv_blocks import KVBlocks
from pallas_kernels.paged_attention.cuts import Cuts, cut
from pallas_kernels.paged_attention.interface import PagedBackend
from pallas_kernels.paged_attention.tiles import DecodeTiles, decode_tiles
from pallas_kernels.paged_attention.walk import LOG2_E, MASKED, Context, Walk, columns_of, finished, initial, walk
from pallas_kernels.triton import check_offsets, plt, power_of_two

_ANY = pl.BlockSpec(memory_space=pl.ANY)


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
    interpret: bool = False,
) -> jax.Array:
    """See `PagedBackend`. `tiles` are for tests and tuning."""
    scoring = Scoring(scale, window, softcap, sinks)
    return attend_rows(q, cache, (block_tables, kv_lens), scoring, layer, tiles=tiles, interpret=interpret)


def attend_interpreted(*args: Any, **options: Any) -> jax.Array:
    """`attend` run by Pallas' interpreter, on any platform: slow, for tests."""
    return attend(*args, **options, interpret=True)


def attend_rows(
    q: jax.Array,
    cache: KVBlocks,
    rows: tuple[jax.Array, jax.Array],
    scoring: Scoring,
    layer: int | jax.Array,
    *,
    num_out: int | None = None,
    tiles: DecodeTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The same for q [tokens, heads, head_dim], token r being that of row r of `rows` (block_tables, kv_lens).

    The first `num_out` tokens (by default all) of the output, which is like q, are written: zero where there is no row
    or an empty one. The others are left as they are, for another kernel to fill.
    """
    check_offsets(cache.k)
    shape = AttentionShape(q.shape[1], cache.k.shape[2], q.shape[2], cache.k.shape[3])
    tiles = tiles or decode_tiles(shape, q.dtype.itemsize)
    call = partial(pl.pallas_call, interpret=interpret)
    how = Walk(scoring.scale, scoring.softcap, tiles.tile_kv, interpret)
    num_out = q.shape[0] if num_out is None else num_out
    tables, kv_lens = rows
    first = 0 if scoring.window is None else jnp.maximum(kv_lens - scoring.window, 0)
    spans = (jnp.broadcast_to(first, kv_lens.shape).astype(jnp.int32), kv_lens)
    operands = (q, cache, tables, jnp.asarray(layer, jnp.int32).reshape(1), scoring.sinks)
    if tables.shape[1] * shape.block_size <= 2 * tiles.min_piece:
        return _whole(call, operands, spans, num_out, how, tiles)
    cuts = cut(spans, shape.num_kv_heads, tiles)
    parts = _pieces(call, operands, cuts, how, tiles)
    return combined(call, parts, q, scoring.sinks, cuts.row_starts, num_out, tiles.tile_pieces)


# --- kernels ----------------------------------------------------------------------------------------------------------


def _whole(
    call: Any, operands: tuple[Any, ...], spans: tuple[Any, Any], num_out: int, how: Walk, tiles: DecodeTiles
) -> jax.Array:
    """Each row by one program a KV head."""
    q, cache = operands[:2]
    out = call(
        partial(_refs(_whole_kernel, operands), how=how, tiles=tiles),
        grid=(cache.k.shape[2], num_out),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        out_specs=_ANY,
        in_specs=[_ANY] * len(jax.tree.leaves((operands, spans))),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name="paged_attention",
    )
    return out(*jax.tree.leaves((operands, spans)))


def _refs(kernel: Any, operands: tuple[Any, ...]) -> Any:
    """The kernel with its first refs put back into the operands' structure."""
    tree = jax.tree.structure(operands)
    size = tree.num_leaves

    def call(*refs: Any, **options: Any) -> None:
        kernel(tree.unflatten(refs[:size]), *refs[size:], **options)

    return call


def _whole_kernel(
    operands: Any, firsts_ref: Any, ends_ref: Any, out_ref: Any, *, how: Walk, tiles: DecodeTiles
) -> None:
    """firsts_ref, ends_ref [rows]; out_ref [tokens, heads, head_dim]."""
    q_ref, _, table_ref, _, sinks_ref = operands
    head, token = pl.program_id(0), pl.program_id(1)
    row = jnp.minimum(token, table_ref.shape[0] - 1)
    first, end = firsts_ref[row], jnp.where(token == row, ends_ref[row], 0)
    context = _context(operands, row, head)
    heads, is_mine = _group(q_ref, context, tiles)
    sinks = None if sinks_ref is None else plt.load(sinks_ref.at[heads], mask=is_mine, other=0.0)
    state = initial(tiles.size, columns_of(context).size, sinks)
    state = walk(state, _queries(q_ref, token, heads, is_mine, context), context, (first, end), how)
    _store(out_ref, token, heads, is_mine, finished(state))


def _pieces(
    call: Any, operands: tuple[Any, ...], cuts: Cuts, how: Walk, tiles: DecodeTiles
) -> tuple[jax.Array, jax.Array]:
    """Each piece's output [pieces, heads, head_dim] and log2 of its weight [pieces, heads], float32."""
    q, cache = operands[:2]
    num_pieces = cuts.rows.shape[0]
    inputs = (operands, cuts.rows, cuts.firsts, cuts.ends)
    return call(
        partial(_refs(_piece_kernel, operands), how=how, tiles=tiles),
        grid=(cache.k.shape[2], num_pieces),
        out_shape=[
            jax.ShapeDtypeStruct((num_pieces, *q.shape[1:]), jnp.float32),
            jax.ShapeDtypeStruct((num_pieces, q.shape[1]), jnp.float32),
        ],
        out_specs=[_ANY, _ANY],
        in_specs=[_ANY] * len(jax.tree.leaves(inputs)),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name="paged_attention_pieces",
    )(*jax.tree.leaves(inputs))


def _piece_kernel(
    operands: Any,
    rows_ref: Any,  # [pieces]
    firsts_ref: Any,
    ends_ref: Any,
    out_ref: Any,  # [pieces, heads, head_dim]
    log_ref: Any,  # [pieces, heads]
    *,
    how: Walk,
    tiles: DecodeTiles,
) -> None:
    q_ref = operands[0]
    head, piece = pl.program_id(0), pl.program_id(1)
    row, first, end = rows_ref[piece], firsts_ref[piece], ends_ref[piece]
    context = _context(operands, row, head)
    heads, is_mine = _group(q_ref, context, tiles)
    state = initial(tiles.size, columns_of(context).size)
    state = walk(state, _queries(q_ref, row, heads, is_mine, context), context, (first, end), how)
    is_mine &= first < end
    _store(out_ref, piece, heads, is_mine, finished(state))
    plt.store(log_ref.at[piece, heads], state.peak + jnp.log2(state.total), mask=is_mine)


def combined(
    call: Any,
    parts: tuple[jax.Array, jax.Array],
    q: jax.Array,
    sinks: jax.Array | None,
    row_starts: jax.Array,
    num_out: int,
    tile_pieces: int,
) -> jax.Array:
    """The rows' outputs, an array like q, from those of their pieces: outputs [pieces, heads, head_dim] and base-2
    logarithms of their weights [pieces, heads]; `row_starts` [rows + 1]. `call` is `pl.pallas_call`."""
    inputs = (sinks, *parts, row_starts)
    return call(
        partial(_refs(_combine_kernel, (sinks,)), tile=tile_pieces),
        grid=(q.shape[1], num_out),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        out_specs=_ANY,
        in_specs=[_ANY] * len(jax.tree.leaves(inputs)),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="paged_attention_combine",
    )(*jax.tree.leaves(inputs))


def _combine_kernel(
    sinks_refs: tuple[Any],
    parts_ref: Any,  # [pieces, heads, head_dim]
    log_ref: Any,  # [pieces, heads]
    starts_ref: Any,  # [rows + 1]
    out_ref: Any,  # [tokens, heads, head_dim]
    *,
    tile: int,
) -> None:
    head, token = pl.program_id(0), pl.program_id(1)
    head_dim = out_ref.shape[2]
    columns = jnp.arange(max(16, power_of_two(head_dim)))
    row = jnp.minimum(token, starts_ref.shape[0] - 2)
    start, end = starts_ref[row], jnp.where(token == row, starts_ref[row + 1], 0)

    def step(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, out = state
        pieces = start + i * tile + jnp.arange(tile)
        live = pieces < end
        logs = plt.load(log_ref.at[pieces, head], mask=live, other=MASKED)
        inside = live[:, None] & (columns < head_dim)[None]
        part = plt.load(parts_ref.at[pieces[:, None], head, columns[None]], mask=inside, other=0.0)
        new_peak = jnp.maximum(peak, jnp.max(logs))
        decay, weights = jnp.exp2(peak - new_peak), jnp.exp2(logs - new_peak)
        out = out * decay + jnp.sum(part * weights[:, None], axis=0)
        return new_peak, total * decay + jnp.sum(weights), out

    nothing = jnp.zeros(columns.shape, jnp.float32)
    if sinks_refs[0] is None:
        state = (jnp.float32(MASKED), jnp.float32(0), nothing)
    else:
        state = (sinks_refs[0][head] * LOG2_E, jnp.float32(1), nothing)
    num_tiles = lax.div(jnp.maximum(end - start, 0) + tile - 1, tile)
    _, total, out = lax.fori_loop(0, num_tiles, step, state)
    out = (out / jnp.where(total == 0, 1.0, total)).astype(out_ref.dtype)
    plt.store(out_ref.at[token, head, columns], out, mask=columns < head_dim)


# --- shared -----------------------------------------------------------------------------------------------------------


def _context(operands: Any, row: jax.Array, head: jax.Array) -> Context:
    _, cache, table_ref, layer_ref, _ = operands
    return Context(*cache, table_ref, row, layer_ref[0], head)


def _group(q_ref: Any, context: Context, tiles: DecodeTiles) -> tuple[jax.Array, jax.Array]:
    """The heads of the tile's queries [size], and which of them belong to this KV head's group."""
    group = q_ref.shape[1] // context.k_ref.shape[2]
    index = jnp.arange(tiles.size)
    return context.head * group + index, index < group


def _queries(q_ref: Any, token: jax.Array, heads: jax.Array, is_mine: jax.Array, context: Context) -> jax.Array:
    columns = columns_of(context)
    inside = is_mine[:, None] & (columns < q_ref.shape[2])[None]
    return plt.load(q_ref.at[token, heads[:, None], columns[None]], mask=inside, other=0.0)


def _store(ref: Any, index: jax.Array, heads: jax.Array, is_mine: jax.Array, out: jax.Array) -> None:
    """out [size, columns] as the heads' vectors of ref[index]."""
    columns = jnp.arange(out.shape[1])
    inside = is_mine[:, None] & (columns < ref.shape[2])[None]
    # In the interpreter, lanes of other groups must not name a place that another lane stores to.
    heads = jnp.where(is_mine, heads, ref.shape[1])
    plt.store(ref.at[index, heads[:, None], columns[None]], out.astype(ref.dtype), mask=inside)


BACKEND = PagedBackend("pallas_triton", attend)
INTERPRETED = PagedBackend("pallas_triton_interpret", attend_interpreted)
