"""Ragged attention in plain XLA: the portable path, and the fast one on CPUs until native kernels come.

The work is two lists of equal pieces, each walked by a loop whose trip count is data, so that the time follows the
live context and neither the table's width nor the longest row:

* decode: the rows' contexts are cut into pieces of `decode_kv` tokens (flash-decoding, arXiv:2311.01282); an
  iteration takes `decode_items` consecutive pieces, of one row or many, and folds them into the rows' running
  (maximum, sum, output) of the online softmax (arXiv:1805.02867). One long row among short ones costs its own pieces.
* prefill: the chunks are cut into tiles of `prefill_q` query tokens; a tile walks its row's context up to its own last
  position, `prefill_kv` tokens at a time.

Layout: K and V as [num_blocks, num_layers, block_size, kv_heads * head_dim], so that a gathered block is one run. Up to
`packed_heads` KV heads share a dot whose queries are laid out block-diagonally: that multiplies zeros, but reads K and
V as they lie, and XLA:CPU loses more by transposing (2-core EPYC: 2.2 ms against 6.4 for 16k tokens of 3 KV heads).
Scales of a quantised cache lie as [num_blocks, num_layers, block_size, kv_heads]; gathered pieces are dequantised to
the type of the queries. A window drops the pieces below it; sinks are what the online softmax starts from.

Bytes: a decode row reads its context once, a prefill tile the context below it. Limits: none on shapes; head_dim,
group and block size are free. On CPU, XLA runs the loop's pieces one after the other, each on all cores.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_blocks import SCALE_DTYPE, KVBlocks, block_bytes, is_quantised, stored_as, write_slots
from pallas_kernels.pieces import Pieces
from pallas_kernels.ragged_attention.interface import AttentionBackend, Ragged, Scoring
from pallas_kernels.ragged_attention.tiles import XlaTiles, xla_tiles

# Far below any score, yet finite: the difference of two of them is 0, not NaN.
MASKED = -1e30


def init_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any, num_layers: int = 1
) -> KVBlocks:
    """Zeroed K and V, [num_blocks, num_layers, block_size, kv_heads * head_dim] each, half precision and float8 as
    bits; scales where quantised."""
    # XLA:CPU copies the cache around an axis of one, so a single layer has none.
    layers = (num_layers,) if num_layers > 1 else ()
    shape, stored = (num_blocks, *layers, block_size, num_kv_heads * head_dim), _stored(dtype)
    scales = [jnp.zeros((*shape[:-1], num_kv_heads), SCALE_DTYPE) for _ in range(2)] if is_quantised(dtype) else []
    return KVBlocks(jnp.zeros(shape, stored), jnp.zeros(shape, stored), *scales)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVBlocks,
    ragged: Ragged,
    *,
    scale: float,
    layer: int | jax.Array = 0,
    window: int | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    max_q_len: int | None = None,
    tiles: XlaTiles | None = None,
) -> tuple[jax.Array, KVBlocks]:
    """See `AttentionBackend`. `tiles` are for tests and tuning."""
    num_tokens, kv_heads = k.shape[:2]
    tiles = tiles or xla_tiles(num_tokens)
    ragged = _in_layer(ragged, layer, cache)
    flat = _write(cache, k, v, ragged.slots)
    grouped = q.reshape(num_tokens, kv_heads, -1, q.shape[-1])  # [tokens, kv_heads, group, head_dim]
    scoring = Scoring(scale, window, softcap, None if sinks is None else sinks.reshape(kv_heads, -1))
    out = _decode(grouped, flat, ragged, scoring, tiles)
    if max_q_len != 1:
        out = _prefill(grouped, out, flat, ragged, scoring, tiles)
    new = jax.tree.map(lambda x, c: x.reshape(c.shape), flat, cache)
    return out.reshape(q.shape).astype(q.dtype), new


def _in_layer(ragged: Ragged, layer: int | jax.Array, cache: KVBlocks) -> Ragged:
    """Tables and slots that count blocks of one layer: the layers' blocks alternate in the flat cache."""
    num_layers, block_size = cache.k.shape[1] if cache.k.ndim == 4 else 1, cache.k.shape[-2]
    blocks, offsets = ragged.slots // block_size, ragged.slots % block_size
    return ragged._replace(
        block_tables=ragged.block_tables * num_layers + layer,
        slots=jnp.where(ragged.slots < 0, -1, (blocks * num_layers + layer) * block_size + offsets),
    )


def _write(cache: KVBlocks, k: jax.Array, v: jax.Array, slots: jax.Array) -> KVBlocks:
    """The flat cache, leaves [num_blocks * num_layers, block_size, columns], with k and v at `slots`."""
    dtype = k.dtype if cache.k_scale is None else _QUANTISED[cache.k.dtype.name]
    return jax.tree.map(lambda leaf, x: _put(leaf, x, slots), cache, stored_as(k, v, dtype))


def _put(cached: jax.Array, values: jax.Array, slots: jax.Array) -> jax.Array:
    block_size, columns = cached.shape[-2:]
    flat = cached.reshape(-1, columns)
    bits = lax.bitcast_convert_type(values, cached.dtype).reshape(-1, columns)
    return write_slots(flat, bits, slots).reshape(-1, block_size, columns)


def _stored(dtype: Any) -> Any:
    """The type that holds numbers of `dtype` in the cache."""
    # XLA:CPU of JAX 0.10 scatters and gathers half precision by converting the whole cache to float32 and back.
    if jnp.dtype(dtype) == jnp.float8_e4m3fn:
        return jnp.uint8
    return jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else dtype


# What the stored type of a quantised cache means.
_QUANTISED = {"uint8": "float8_e4m3fn", "int8": "int8"}


# --- decode -----------------------------------------------------------------------------------------------------------


class Running(NamedTuple):
    """The online softmax of each row so far, float32."""

    peak: jax.Array  # [rows, kv_heads, group] largest score
    total: jax.Array  # [rows, kv_heads, group] sum of exp(score - peak)
    out: jax.Array  # [rows, kv_heads, group, head_dim] sum of exp(score - peak) * v


def _decode(q: jax.Array, cache: KVBlocks, ragged: Ragged, scoring: Scoring, tiles: XlaTiles) -> jax.Array:
    """Attention output of the decode rows, in place of their tokens: [tokens, kv_heads, group, head_dim], float32."""
    num_tokens, kv_heads, group, head_dim = q.shape
    num_rows = ragged.kv_lens.shape[0]
    items = tiles.decode_items
    width = _whole_blocks(tiles.decode_kv, cache)
    is_decode = jnp.arange(num_rows) < ragged.num_decode_rows
    first = _first_seen(ragged.kv_lens - 1, scoring) // width
    pieces = Pieces.of(jnp.where(is_decode, -(-ragged.kv_lens // width) - first, 0))

    def step(i: jax.Array, state: Running) -> Running:
        index = i * items + jnp.arange(items, dtype=jnp.int32)
        row, piece = pieces.locate(index)
        kv_lens = jnp.where(index < pieces.total, ragged.kv_lens[row], 0)
        start = (piece + first[row]) * width
        partial = _piece(q[row], cache, ragged.block_tables[row], start, kv_lens, scoring, tiles)
        return _fold(state, partial, row, kv_lens > 0)

    # Rows past the end keep the slice of `items` rows that an iteration updates inside the array.
    shape = (num_rows + items, kv_heads, group)
    state = _initial(shape, head_dim, scoring.sinks)
    state = lax.fori_loop(0, -(-pieces.total // items), step, state)
    out = state.out / jnp.where(state.total == 0, 1.0, state.total)[..., None]
    rows = min(num_rows, num_tokens)
    return jnp.zeros(q.shape, jnp.float32).at[:rows].set(out[:rows])


def _piece(
    q: jax.Array,
    cache: KVBlocks,
    tables: jax.Array,
    start: jax.Array,
    kv_lens: jax.Array,
    scoring: Scoring,
    tiles: XlaTiles,
) -> Running:
    """Attention of q [items, kv_heads, group, head_dim] to `decode_kv` tokens from `start` [items] of each table."""
    width = _whole_blocks(tiles.decode_kv, cache)
    keys = start[:, None] + jnp.arange(width)
    live = keys < kv_lens[:, None]  # [items, width]
    if scoring.window is not None:
        live &= keys >= _first_seen(kv_lens - 1, scoring)[:, None]
    k, v = _gather(cache, tables, start, live, q.dtype)
    parts = []
    for heads in _packs(q.shape[1], tiles.packed_heads):
        scores = _capped(_scores(q[:, heads], _columns(k, heads, q.shape[-1])), scoring)
        scores = jnp.where(live[:, None], scores, MASKED)
        peak = jnp.max(scores, -1)
        weights = jnp.exp(scores - peak[..., None])
        out = _weigh(weights.astype(v.dtype), _columns(v, heads, q.shape[-1]), q[:, heads].shape)
        grouped = (q.shape[0], *q[:, heads].shape[1:3])
        parts.append(Running(peak.reshape(grouped), jnp.sum(weights, -1).reshape(grouped), out))
    return Running(*(jnp.concatenate(x, axis=1) for x in zip(*parts)))


def _fold(state: Running, partial: Running, row: jax.Array, live: jax.Array) -> Running:
    """Merge pieces into their rows. The rows of an iteration are consecutive, so they lie in one slice."""
    items = row.shape[0]
    first = row[0]
    old = Running(*(lax.dynamic_slice_in_dim(x, first, items) for x in state))
    owns = (row - first == jnp.arange(items)[:, None]) & live  # [slice row, piece]
    owned = owns[..., None, None]
    peak = jnp.maximum(old.peak, jnp.max(jnp.where(owned, partial.peak, MASKED), axis=1))
    decay = jnp.exp(old.peak - peak)
    # A piece's factor; pieces outside every row of the slice are dead and weigh 0.
    factor = jnp.sum(jnp.where(owned, peak[:, None], 0.0), axis=0)
    factor = jnp.where(live[:, None, None], jnp.exp(partial.peak - factor), 0.0)
    # A dot would carry NaN and infinity to every row, since 0 * NaN is NaN: such a piece marks its own row's total.
    weighed = partial.out * factor[..., None]
    is_sound = jnp.isfinite(jnp.sum(weighed, -1))
    weighed = jnp.where(is_sound[..., None], weighed, 0.0)
    add = jnp.tensordot(owns.astype(jnp.float32), weighed, 1, precision=lax.Precision.HIGHEST)
    totals = jnp.where(is_sound, partial.total * factor, jnp.nan)
    total = old.total * decay + jnp.sum(jnp.where(owned, totals, 0.0), axis=1)
    new = Running(peak, total, old.out * decay[..., None] + add)
    return Running(*(lax.dynamic_update_slice_in_dim(x, y, first, 0) for x, y in zip(state, new)))


# --- prefill ----------------------------------------------------------------------------------------------------------


def _prefill(
    q: jax.Array, out: jax.Array, cache: KVBlocks, ragged: Ragged, scoring: Scoring, tiles: XlaTiles
) -> jax.Array:
    """`out` [tokens, kv_heads, group, head_dim] with the tokens of the rows past the decode rows filled in."""
    num_tokens = q.shape[0]
    tile = tiles.prefill_q
    q_lens = ragged.q_starts[1:] - ragged.q_starts[:-1]
    is_prefill = jnp.arange(q_lens.shape[0]) >= ragged.num_decode_rows
    pieces = Pieces.of(jnp.where(is_prefill, -(-q_lens // tile), 0))
    # Room for the last tile's tail, so that its slice is not moved back over earlier tokens.
    q = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        row, piece = pieces.locate(i)
        start = ragged.q_starts[row] + piece * tile
        tokens = start + jnp.arange(tile)
        positions = tokens - ragged.q_starts[row + 1] + ragged.kv_lens[row]
        mine = lax.dynamic_slice_in_dim(q, start, tile)
        new = _tile(mine, cache, ragged.block_tables[row], positions, ragged.kv_lens[row], scoring, tiles)
        # The tail of a row's last tile belongs to others.
        inside = (tokens < ragged.q_starts[row + 1])[:, None, None, None]
        new = jnp.where(inside, new, lax.dynamic_slice_in_dim(out, start, tile))
        return lax.dynamic_update_slice_in_dim(out, new, start, 0)

    return lax.fori_loop(0, pieces.total, step, out)[:num_tokens]


def _tile(
    q: jax.Array,
    cache: KVBlocks,
    table: jax.Array,
    positions: jax.Array,
    kv_len: jax.Array,
    scoring: Scoring,
    tiles: XlaTiles,
) -> jax.Array:
    """Attention of one tile q [tile, kv_heads, group, head_dim] at `positions` [tile] to its row's context below."""
    tile, kv_heads, group, head_dim = q.shape
    width = _whole_blocks(tiles.prefill_kv, cache)
    q = q.transpose(1, 2, 0, 3).reshape(kv_heads, group * tile, head_dim)
    last = jnp.minimum(positions[-1] + 1, kv_len)

    def step(i: jax.Array, state: Running) -> Running:
        keys = i * width + jnp.arange(width)
        k, v = _gather(cache, table[None], i[None] * width, (keys < kv_len)[None], q.dtype)
        seen = keys <= positions[:, None]
        if scoring.window is not None:
            seen &= keys >= _first_seen(positions, scoring)[:, None]
        seen = jnp.tile(seen, (group, 1))  # [group * tile, width]
        new = [_advance(h, q[h], k[0], v[0], seen, scoring, state) for h in range(kv_heads)]
        return Running(*(jnp.stack(x) for x in zip(*new)))

    sinks = None if scoring.sinks is None else jnp.repeat(scoring.sinks, tile, axis=1)
    state = _initial((kv_heads, group * tile), head_dim, sinks)
    state = lax.fori_loop(_first_seen(positions[0], scoring) // width, -(-last // width), step, state)
    out = state.out / jnp.where(state.total > 0, state.total, 1.0)[..., None]
    return out.reshape(kv_heads, group, tile, head_dim).transpose(2, 0, 1, 3)


def _advance(
    head: int, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scoring: Scoring, state: Running
) -> Running:
    """One KV head's online softmax, one piece of context further: q [queries, head_dim], k and v [width, …]."""
    columns = slice(head * q.shape[-1], (head + 1) * q.shape[-1])
    scores = jnp.where(seen, _capped(_dot("qd,sd->qs", q, k[:, columns]), scoring), MASKED)
    peak = jnp.maximum(state.peak[head], jnp.max(scores, -1))
    weights = jnp.exp(scores - peak[:, None])
    decay = jnp.exp(state.peak[head] - peak)
    out = state.out[head] * decay[:, None] + _dot("qs,sd->qd", weights.astype(v.dtype), v[:, columns])
    return Running(peak, state.total[head] * decay + jnp.sum(weights, -1), out)


# --- shared -----------------------------------------------------------------------------------------------------------


def _initial(shape: tuple[int, ...], head_dim: int, sinks: jax.Array | None) -> Running:
    """The online softmax before any token: nothing, or a sink's logit, whose value is zero."""
    out = jnp.zeros((*shape, head_dim))
    if sinks is None:
        return Running(jnp.full(shape, MASKED), jnp.zeros(shape), out)
    return Running(jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape), out)


def _first_seen(positions: jax.Array, scoring: Scoring) -> jax.Array:
    """The first token that those at `positions` see."""
    if scoring.window is None:
        return jnp.zeros_like(positions)
    return jnp.maximum(positions - scoring.window + 1, 0)


def _capped(scores: jax.Array, scoring: Scoring) -> jax.Array:
    scores = scores * scoring.scale
    return scores if scoring.softcap is None else scoring.softcap * jnp.tanh(scores / scoring.softcap)


def _whole_blocks(width: int, cache: KVBlocks) -> int:
    """`width` tokens rounded up to whole blocks."""
    block_size = cache.k.shape[1]
    return -(-width // block_size) * block_size


def _gather(
    cache: KVBlocks, tables: jax.Array, start: jax.Array, live: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """K and V [items, width, kv_heads * head_dim] from token `start` [items] on of each table [items, max_blocks].

    V is cleared where not `live` [items, width]: such slots may hold NaN, and 0 * NaN is NaN. (Scores are replaced.)
    """
    block_size = cache.k.shape[1]
    columns = start[:, None] // block_size + jnp.arange(live.shape[1] // block_size)
    columns = jnp.minimum(columns, tables.shape[1] - 1)
    blocks = jnp.take_along_axis(tables, columns, axis=1)
    blocks = jnp.clip(blocks, 0, cache.k.shape[0] - 1)
    k, v = (_read(x, scale, blocks, live.shape, dtype) for x, scale in zip(cache[:2], cache[2:]))
    return k, jnp.where(live[..., None], v, jnp.zeros((), v.dtype))


def _read(x: jax.Array, scale: jax.Array | None, blocks: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Blocks of x as [items, width, kv_heads * head_dim] of `dtype`; `shape` is [items, width]."""
    x = x.at[blocks].get(mode="promise_in_bounds").reshape(*shape, -1)
    if scale is None:
        return lax.bitcast_convert_type(x, dtype)
    x = lax.bitcast_convert_type(x, _QUANTISED[x.dtype.name]).astype(jnp.float32)
    scale = scale.at[blocks].get(mode="promise_in_bounds").reshape(*shape, -1, 1)
    return (x.reshape(*scale.shape[:-1], -1) * scale).reshape(x.shape).astype(dtype)


def _packs(kv_heads: int, packed: int) -> list[slice]:
    """KV heads in the fewest even runs of at most `packed`."""
    runs = -(-kv_heads // packed)
    bounds = [kv_heads * i // runs for i in range(runs + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]


def _columns(x: jax.Array, heads: slice, head_dim: int) -> jax.Array:
    return x[..., heads.start * head_dim : heads.stop * head_dim]


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q [items, heads, group, head_dim] against k [items, width, heads * head_dim]: [items, heads * group, width]."""
    items, heads, group, head_dim = q.shape
    own = jnp.eye(heads, dtype=q.dtype)[None, :, None, :, None]
    diagonal = (q[:, :, :, None, :] * own).reshape(items, heads * group, heads * head_dim)
    return _dot("nhe,nse->nhs", diagonal, k)


def _weigh(weights: jax.Array, v: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """weights [items, heads * group, width] of v [items, width, heads * head_dim], as `shape` (that of the queries)."""
    items, heads, group, head_dim = shape
    every = _dot("nhs,nse->nhe", weights, v).reshape(items, heads, group, heads, head_dim)
    return jnp.stack([every[:, h, :, h] for h in range(heads)], axis=1)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In float32, exactly so for float32 inputs (a GPU would round them to TF32)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


BACKEND = AttentionBackend("xla", init_cache, block_bytes, attend, prefers_loop=True)
