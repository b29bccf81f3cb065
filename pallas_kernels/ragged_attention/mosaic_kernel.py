"""The device's side of ragged attention on Hopper: which piece when, what the producer does, and what a consumer does.

See `pallas_mosaic.py` for the algorithm and its limits.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import warpgroups as wgs
from pallas_kernels.mosaic.support import plgpu
from pallas_kernels.mosaic.tiles import ROWS, PrefillTiles, registers
from pallas_kernels.mosaic.warpgroups import Ring, Scores, Softmax


class Piece(NamedTuple):
    """One row's tokens in one tile of the packed batch; int32, one array a field or one scalar."""

    row: jax.Array
    base: jax.Array  # the tile's first packed token
    begin: jax.Array  # the row's tokens in the tile are base + begin .. base + end - 1
    end: jax.Array
    position: jax.Array  # of token `base` in the row's context; negative where the row begins later
    kv_len: jax.Array  # 0 for padding tokens, whose output is 0


def scratch(k: jax.Array, tiles: PrefillTiles, interpret: Any) -> list[Any]:
    block_size, head_dim = k.shape[3:]
    ring = (
        wgs.shared((tiles.slots, tiles.tile_kv, head_dim), k.dtype),
        plgpu.Barrier(num_barriers=tiles.slots, num_arrivals=tiles.tile_kv // block_size),
        plgpu.Barrier(num_barriers=tiles.slots, num_arrivals=tiles.consumers),
    )
    return [
        wgs.shared((tiles.consumers, ROWS, head_dim), k.dtype),
        plgpu.Barrier(num_barriers=tiles.consumers),
        *ring,
        *ring,
        plgpu.Barrier(num_barriers=1, num_arrivals=tiles.tile_kv // block_size),
        # Plain rows, so that each can be copied alone.
        plgpu.SMEM((tiles.consumers, ROWS, head_dim), k.dtype),
        *([wgs.shared((tiles.consumers, ROWS, tiles.tile_kv), k.dtype)] if interpret else []),
    ]


def kernel(
    q_ref: Any,  # [tokens, heads, head_dim]
    k_ref: Any,  # [num_blocks, layers, kv_heads, block_size, head_dim]
    v_ref: Any,
    table_ref: Any,  # [rows, max_blocks]
    pieces_ref: Any,  # [fields of Piece, bound]
    count_ref: Any,  # [1] pieces
    sinks_ref: Any,  # [heads]
    layer_ref: Any,  # [1]
    out_ref: Any,  # like q_ref
    q_tiles: Any,  # [consumers, 64, head_dim]
    q_ready: Any,
    k_tiles: Any,
    k_ready: Any,
    k_free: Any,
    v_tiles: Any,
    v_ready: Any,
    v_free: Any,
    landed: Any,
    out_rows: Any,  # [consumers, 64, head_dim]
    staged: Any = None,  # [consumers, 64, tile_kv], interpreted only
    *,
    scores: Scores,
    window: int | None,
    tiles: PrefillTiles,
    interpret: Any,
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    k_ring, v_ring = Ring(k_tiles, k_ready, k_free), Ring(v_tiles, v_ready, v_free)
    schedule = partial(_schedule, pieces_ref, count_ref, q_ref.shape[1], tiles.num_programs)

    @pl.when(warpgroup < tiles.consumers)
    def _consume() -> None:
        plgpu.set_max_registers(registers(tiles.consumers).consumer, action="increase")
        rounds, piece_of = schedule()
        consumer = _Consumer(
            warpgroup,
            q_tiles.at[warpgroup],
            out_rows.at[warpgroup],
            staged.at[warpgroup] if interpret else None,
            k_ring,
            v_ring,
            scores,
            window,
            tiles,
            interpret,
        )

        def work(i: jax.Array, step: jax.Array) -> jax.Array:
            piece, head = piece_of(i)
            mine = q_ref.at[pl.ds(_multiple_of_rows(piece.base, warpgroup), ROWS), head]
            plgpu.copy_gmem_to_smem(mine, consumer.q, q_ready.at[warpgroup])
            plgpu.barrier_wait(q_ready.at[warpgroup])
            step, state = _attend(consumer, lambda: piece_of(i)[0], step)
            piece, head = piece_of(i)
            _store(consumer, piece, head, _with_sink(state, sinks_ref[head]), out_ref)
            return step

        lax.fori_loop(0, rounds, work, jnp.int32(0))

    @pl.when(warpgroup == tiles.consumers)
    def _produce() -> None:
        plgpu.set_max_registers(registers(tiles.consumers).producer, action="decrease")
        rounds, piece_of = schedule()
        layer, (num_blocks, _, kv_heads, block_size, _) = layer_ref[0], k_ref.shape

        def work(i: jax.Array, step: jax.Array) -> jax.Array:
            piece, head = piece_of(i)
            first, last = _tiles_of(piece, window, tiles.tile_kv)
            kv_head = head // (q_ref.shape[1] // kv_heads)
            last_block, live = (piece.kv_len - 1) // block_size, _seen_by(piece, window)

            def index(n: jax.Array) -> tuple[Any, ...]:
                block_id = table_ref[piece.row, jnp.minimum(n, last_block)]
                return (jnp.clip(block_id, 0, num_blocks - 1), layer, kv_head)

            keys, values = (wgs.Source(x, index, tiles.tile_kv // block_size) for x in (k_ref, v_ref))

            def load(tile: jax.Array, step: jax.Array) -> jax.Array:
                wgs.fill_slot(k_ring, step, keys, tile)
                wgs.fill_slot_cleared(v_ring, step, values, tile, live, landed)
                return step + 1

            return lax.fori_loop(first, last, load, step)

        num_steps = lax.fori_loop(0, rounds, work, jnp.int32(0))
        wgs.wait_till_free(k_ring, num_steps)
        wgs.wait_till_free(v_ring, num_steps)


# --- which piece when -------------------------------------------------------------------------------------------------


def _schedule(pieces_ref: Any, count_ref: Any, heads: int, num_programs: int) -> tuple[jax.Array, Any]:
    """How many rounds this program works, and `piece_of(round)`: its piece and head."""
    program = lax.axis_index("program")
    total = count_ref[0] * heads

    def index_of(i: jax.Array) -> jax.Array:
        # Later pieces of a row are longer: programs take them in turn from both ends.
        return i * num_programs + jnp.where(lax.rem(i, jnp.int32(2)) == 0, program, num_programs - 1 - program)

    def piece_of(i: jax.Array) -> tuple[Piece, jax.Array]:
        index, count = index_of(i), count_ref[0]
        which = lax.rem(index, count)
        return Piece(*(pieces_ref[field, which] for field in range(len(Piece._fields)))), index // count

    rounds = total // num_programs
    return rounds + (index_of(rounds) < total).astype(jnp.int32), piece_of


def _tiles_of(piece: Piece, window: int | None, tile_kv: int) -> tuple[jax.Array, jax.Array]:
    """The tiles [first, last) of cached tokens that any query of the piece sees."""
    first, end = _seen_by(piece, window)
    return first // tile_kv, pl.cdiv(end, jnp.int32(tile_kv))


def _seen_by(piece: Piece, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Cached tokens [first, end) that any query of the piece sees."""
    end = jnp.where(piece.kv_len > 0, piece.position + piece.end, 0)
    first = jnp.maximum(piece.position + piece.begin - window + 1, 0) if window is not None else jnp.int32(0)
    return jnp.minimum(first, end), end


def _multiple_of_rows(base: jax.Array, warpgroup: jax.Array) -> jax.Array:
    return pl.multiple_of(base + warpgroup * ROWS, ROWS)


# --- what a consumer does ---------------------------------------------------------------------------------------------


class _Consumer(NamedTuple):
    """A consumer's own refs, the rings it shares, and what is fixed."""

    index: jax.Array
    q: Any  # [64, head_dim]
    out_rows: Any  # [64, head_dim]
    staged: Any  # [64, tile_kv], interpreted only
    k_ring: Ring
    v_ring: Ring
    scores: Scores
    window: int | None
    tiles: PrefillTiles
    interpret: Any


def _attend(consumer: _Consumer, read: Any, step: jax.Array) -> tuple[jax.Array, Softmax]:
    """The next step's number, and the finished softmax of the consumer's 64 tokens.

    `read()` gives the piece. It is read anew for every loop, since the loop over whole tiles needs all registers.
    """

    def attend(is_masked: bool, piece: Piece, tile: jax.Array, state: Softmax) -> Softmax:
        first, _ = _tiles_of(piece, consumer.window, consumer.tiles.tile_kv)
        return _attend_tile(consumer, piece, step + tile - first, tile, state, is_masked)

    state = wgs.start(*consumer.q.shape)
    if consumer.window is not None:
        spans = _spans(consumer, piece := read())
        state = lax.fori_loop(spans.first, spans.whole, partial(attend, True, piece), state)
    spans = _spans(consumer, piece := read())
    state = lax.fori_loop(spans.whole, spans.masked, partial(attend, False, piece), state)
    spans = _spans(consumer, piece := read())
    state = lax.fori_loop(spans.masked, spans.own, partial(attend, True, piece), state)
    step -= spans.first
    lax.fori_loop(spans.own, spans.last, lambda tile, _: _pass(consumer, step + tile), None)
    return step + spans.last, state


class _Spans(NamedTuple):
    """A piece's tiles of cached tokens are first .. last - 1. One consumer sees those from `whole` to `masked` without
    a mask, the others up to `own` with one, and passes over the rest."""

    first: jax.Array
    whole: jax.Array
    masked: jax.Array
    own: jax.Array
    last: jax.Array


def _spans(consumer: _Consumer, piece: Piece) -> _Spans:
    tile_kv, window = consumer.tiles.tile_kv, consumer.window
    first, last = _tiles_of(piece, window, tile_kv)
    begin = jnp.maximum(piece.begin, consumer.index * ROWS)
    end = jnp.minimum(piece.end, (consumer.index + 1) * ROWS)
    is_busy = (begin < end) & (piece.kv_len > 0)
    own = jnp.where(is_busy, pl.cdiv(piece.position + end, jnp.int32(tile_kv)), first)
    whole = first
    if window is not None:
        whole = jnp.clip(pl.cdiv(jnp.maximum(piece.position + end - window, 0), jnp.int32(tile_kv)), first, own)
    masked = jnp.clip((piece.position + begin + 1) // tile_kv, whole, own)
    return _Spans(first, whole, masked, own, last)


def _attend_tile(
    consumer: _Consumer, piece: Piece, step: jax.Array, tile: jax.Array, state: Softmax, is_masked: bool
) -> Softmax:
    k_ring, v_ring = consumer.k_ring, consumer.v_ring
    slot = lax.rem(step, jnp.int32(consumer.tiles.slots))
    plgpu.barrier_wait(k_ring.ready.at[slot])
    product = wgs.products(consumer.q, k_ring.tiles.at[slot], consumer.tiles.tile_kv, consumer.interpret)
    plgpu.barrier_arrive(k_ring.free.at[slot])
    seen = _seen(consumer, piece, tile, product.shape) if is_masked else None
    state, weights = wgs.advance(state, product, consumer.scores, seen, consumer.q.dtype)
    plgpu.barrier_wait(v_ring.ready.at[slot])
    out = wgs.weigh(state.out, weights, v_ring.tiles.at[slot], consumer.staged, consumer.interpret)
    plgpu.barrier_arrive(v_ring.free.at[slot])
    return state._replace(out=out)


def _pass(consumer: _Consumer, step: jax.Array) -> None:
    """Lets a tile go that only the other consumer needs.

    It waits all the same: two arrivals of one consumer would free a slot that the other still reads.
    """
    slot = lax.rem(step, jnp.int32(consumer.tiles.slots))
    plgpu.barrier_wait(consumer.k_ring.ready.at[slot])
    plgpu.barrier_arrive(consumer.k_ring.free.at[slot])
    plgpu.barrier_wait(consumer.v_ring.ready.at[slot])
    plgpu.barrier_arrive(consumer.v_ring.free.at[slot])


def _seen(consumer: _Consumer, piece: Piece, tile: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Which keys of the tile each query sees, [64, tile_kv]."""
    # Rows as a vector and columns from the tile's start: neither keeps a register for each score through the loop.
    rows = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1))
    columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    last = rows + (piece.position + consumer.index * ROWS - tile * consumer.tiles.tile_kv)
    seen = columns <= lax.broadcast_in_dim(last, shape, [0])
    if consumer.window is not None:
        seen &= columns > lax.broadcast_in_dim(last - consumer.window, shape, [0])
    return seen


def _with_sink(state: Softmax, sink: jax.Array) -> Softmax:
    """A logit more in the total, that weighs no value; `MASKED` for none."""
    weight = jnp.exp2(sink * wgs.LOG2_E - state.peak)
    return state._replace(total=jnp.where(state.total > 0, state.total + weight, 0.0))


def _store(consumer: _Consumer, piece: Piece, head: jax.Array, state: Softmax, out_ref: Any) -> None:
    """Writes the consumer's tokens of the piece, and no others: they belong to other pieces."""
    begin = jnp.maximum(piece.begin - consumer.index * ROWS, 0)
    end = jnp.minimum(piece.end - consumer.index * ROWS, ROWS)
    start = _multiple_of_rows(piece.base, consumer.index)
    out = wgs.normalized(state).astype(consumer.q.dtype)
    is_whole = (begin == 0) & (end == ROWS)

    @pl.when(is_whole)
    def _whole() -> None:
        consumer.q[...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(consumer.q, out_ref.at[pl.ds(start, ROWS), head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(~is_whole & (begin < end))
    def _shared() -> None:
        consumer.out_rows[...] = out
        plgpu.commit_smem()

        def copy(i: jax.Array, _: None) -> None:
            plgpu.copy_smem_to_gmem(consumer.out_rows.at[pl.ds(i, 1)], out_ref.at[pl.ds(start + i, 1), head])

        lax.fori_loop(begin, end, copy, None)
        plgpu.wait_smem_to_gmem(0)
