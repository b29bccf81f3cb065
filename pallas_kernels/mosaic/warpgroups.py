"""The work of one warpgroup on one tile: a producer's copies, a consumer's products and online softmax.

Each function runs inside a kernel. K and V tiles lie in rings of slots in shared memory; a slot's `ready` barrier
completes when the TMA has filled it, its `free` barrier when every consumer has done with it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.support import plgpu

LOG2_E = math.log2(math.e)
# Far below any score, yet finite: the difference of two of them is 0, not NaN. A power of two, so that scaling it does
# not round: a fused multiply-add would leave the rounding error, which is astronomical.
MASKED = -(2.0**100)
TABLE_READS = 4


class Ring(NamedTuple):
    """The refs of one tensor's ring."""

    tiles: Any  # [slots, tile_kv, head_dim] shared memory
    ready: Any  # [slots] barriers, one arrival a copied block
    free: Any  # [slots] barriers, one arrival a consumer


class Softmax(NamedTuple):
    """An online softmax in the making, float32. Scores are in units of log 2, so that exp2 serves."""

    out: jax.Array  # [rows, head_dim] sum of 2^(score - peak) * v
    peak: jax.Array  # [rows] largest score
    total: jax.Array  # [rows] sum of 2^(score - peak)


class Scores(NamedTuple):
    """How products become scores."""

    scale: float
    softcap: float | None


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory laid out for TMA and wgmma: tiles of 8 rows, swizzled as wide as the last axis allows."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = next(s for s in (128, 64, 32) if shape[-1] * bits // 8 % s == 0)
    transforms = (plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def start(rows: int, head_dim: int) -> Softmax:
    """Nothing attended yet."""
    by_row = plgpu.Layout.WGMMA.reduce(1)
    return Softmax(
        plgpu.layout_cast(jnp.zeros((rows, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((rows,), MASKED, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), by_row),
    )


class Source(NamedTuple):
    """Where a producer finds the tiles of a row's K or V."""

    blocks: Any  # [num_blocks, layers, kv_heads, block_size, head_dim], global memory
    index: Callable[[jax.Array], tuple[Any, ...]]  # of the row's n-th block in it
    per_tile: int  # blocks in a tile


def fill_slot(ring: Ring, step: jax.Array, source: Source, tile: jax.Array) -> None:
    """Copies a tile's blocks into the slot of `step`, once it is free; they arrive at its `ready` barrier."""
    slot = _when_free(ring, step)
    _copy(ring.tiles.at[slot], source, tile, ring.ready.at[slot])


def fill_slot_cleared(
    ring: Ring, step: jax.Array, source: Source, tile: jax.Array, live: tuple[jax.Array, jax.Array], landed: Any
) -> None:
    """`fill_slot`, but with zeroes at positions outside `live` (from, to).

    Of a tile with such positions the copies arrive at `landed`, and this warpgroup for them at `ready` when it has
    overwritten what may be NaN: a weight of 0 times NaN would be NaN.
    """
    slot, tile_kv = _when_free(ring, step), ring.tiles.shape[1]
    first = tile * tile_kv
    is_whole = (first >= live[0]) & (first + tile_kv <= live[1])
    pl.when(is_whole)(lambda: _copy(ring.tiles.at[slot], source, tile, ring.ready.at[slot]))

    @pl.when(~is_whole)
    def _() -> None:
        _copy(ring.tiles.at[slot], source, tile, landed)
        plgpu.barrier_wait(landed)
        _clear_dead(ring.tiles.at[slot], first, live)
        for _ in range(source.per_tile):
            plgpu.barrier_arrive(ring.ready.at[slot])


def wait_till_free(ring: Ring, num_steps: jax.Array) -> None:
    """Waits until consumers have done with all of `num_steps` fillings: no barrier goes with an arrival unawaited."""
    used = jnp.minimum(num_steps, ring.tiles.shape[0])
    lax.fori_loop(0, used, lambda slot, _: plgpu.barrier_wait(ring.free.at[slot]), None)


def _when_free(ring: Ring, step: jax.Array) -> jax.Array:
    slots = ring.tiles.shape[0]
    slot = lax.rem(step, jnp.int32(slots))
    pl.when(step >= slots)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
    return slot


def _copy(target: Any, source: Source, tile: jax.Array, barrier: Any) -> None:
    """The blocks of `tile` into target [tile_kv, head_dim], each an arrival at `barrier`."""
    size = target.shape[0] // source.per_tile
    for i in range(0, source.per_tile, TABLE_READS):
        # A few table entries at a time: their loads overlap, and the producer has few registers.
        some = range(i, min(i + TABLE_READS, source.per_tile))
        for j, index in [(j, source.index(tile * source.per_tile + j)) for j in some]:
            plgpu.copy_gmem_to_smem(source.blocks.at[index], target.at[pl.ds(j * size, size)], barrier)


def _clear_dead(v: Any, first: jax.Array, live: tuple[jax.Array, jax.Array]) -> None:
    """Zeroes the rows of v [tile_kv, head_dim] whose position, from `first` on, lies outside `live`."""
    rows, head_dim = v.shape
    width = next(w for w in (64, 32, 16) if head_dim % w == 0)  # a swizzled run
    for row in range(0, rows, 64):
        for column in range(0, head_dim, width):
            part = v.at[pl.ds(row, 64), pl.ds(column, width)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            positions = first + row + plgpu.broadcasted_iota(jnp.int32, (64, width), 0, layout=plgpu.Layout.WGMMA)
            is_live = (positions >= live[0]) & (positions < live[1])
            part[...] = jnp.where(is_live, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def products(q: Any, k: Any, tile_kv: int, interpret: Any) -> jax.Array:
    """q [rows, head_dim] times k [tile_kv, head_dim] transposed, both in shared memory: [rows, tile_kv] float32."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, q, k.T)
        return acc[...]

    product = pl.run_scoped(multiply, plgpu.ACC((q.shape[0], tile_kv), jnp.float32))
    return product + touched(k) if interpret else product


def advance(
    state: Softmax, product: jax.Array, scores: Scores, seen: jax.Array | None, dtype: Any
) -> tuple[Softmax, jax.Array]:
    """One tile's products [rows, tile_kv] taken in, but for V: the state to add weights @ v to, and the weights."""
    if scores.softcap is not None:
        product = jnp.tanh(product * (scores.scale / scores.softcap))
    # Scaled behind the maximum, so that one fused multiply-add a score remains.
    scale = (scores.softcap or scores.scale) * LOG2_E
    if seen is not None:
        product = jnp.where(seen, product, MASKED)
    peak = jnp.maximum(state.peak, jnp.max(product, axis=1) * scale)
    decay = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(product * scale - lax.broadcast_in_dim(peak, product.shape, [0]))
    total = state.total * decay + jnp.sum(weights, axis=1)
    out = state.out * lax.broadcast_in_dim(decay, state.out.shape, [0])
    out, peak, total, weights = lax.optimization_barrier((out, peak, total, weights.astype(dtype)))
    return Softmax(out, peak, total), weights


def weigh(out: jax.Array, weights: jax.Array, v: Any, staged: Any, interpret: Any) -> jax.Array:
    """out [rows, head_dim] + weights [rows, tile_kv] @ v [tile_kv, head_dim] (shared memory).

    The interpreter multiplies from shared memory only, so there the weights pass through `staged`.
    """
    if not interpret:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.ACC.init(out))
    staged[...] = weights
    plgpu.commit_smem()

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, staged, v)
        return acc[...]

    return out + pl.run_scoped(multiply, plgpu.ACC(out.shape, jnp.float32)) + touched(v)


def touched(ref: Any) -> jax.Array:
    """Zero, and `ref` read once more: wgmma's own reads escape the interpreter's race detector, loads don't."""
    values = ref[...]
    plgpu.commit_smem()
    return jnp.sum(jnp.where(jnp.isnan(values), 0, values).astype(jnp.float32)) * 0.0


def normalized(state: Softmax) -> jax.Array:
    """The attention output [rows, head_dim], float32; 0 where nothing was attended."""
    total = jnp.where(state.total > 0, state.total, 1.0)
    return state.out / lax.broadcast_in_dim(total, state.out.shape, [0])


def log_weight(state: Softmax) -> jax.Array:
    """The base-2 logarithm of each row's sum of exp(score), [rows]; `MASKED` where nothing was attended."""
    return jnp.where(state.total > 0, state.peak + jnp.log2(jnp.where(state.total > 0, state.total, 1.0)), MASKED)
