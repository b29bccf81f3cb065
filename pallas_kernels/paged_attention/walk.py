"""One walk over a row's context, tile by tile, inside a Triton kernel: what decode and prefill kernels share.

A step looks up the blocks of `tile_kv` tokens in the table, loads their K and V of one KV head, and folds them into
the online softmax (arXiv:1805.02867) of `size` packed query vectors. Scores are kept in powers of two, so that a weight
is one exp2. A quantised tile is multiplied as it lies, its scales applied to scores and weights: [size, tile_kv]
products in place of [tile_kv, head_dim].

Guards: block ids are clamped into the cache; lanes outside the span load nothing, and V's zeros keep NaN out.
"""

from collections.abc import Callable
from math import log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.triton import plt, power_of_two

# Far below any score, yet finite: the difference of two of them is 0, not NaN.
MASKED = -1e30
LOG2_E = 1.4426950408889634


class Running(NamedTuple):
    """The online softmax so far, float32, scores in powers of two."""

    peak: jax.Array  # [size] largest score
    total: jax.Array  # [size] sum of 2**(score - peak)
    out: jax.Array  # [size, columns] sum of 2**(score - peak) * v


class Context(NamedTuple):
    """Where one row's keys and values of one KV head lie. Refs in memory, scalars in registers."""

    k_ref: Any  # [num_blocks, num_layers, kv_heads, block_size, head_dim]
    v_ref: Any
    k_scale_ref: Any | None  # [num_blocks, num_layers, kv_heads, block_size]
    v_scale_ref: Any | None
    table_ref: Any  # [rows, max_blocks]
    row: jax.Array
    layer: jax.Array
    head: jax.Array


class Walk(NamedTuple):
    """How to walk: fixed when a kernel is compiled."""

    scale: float
    softcap: float | None
    tile_kv: int
    interpret: bool = False

    def dot(self, a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
        """a @ b in float32. Three products in TF32 make one of float32 on tensor cores, to about 2**-21; ordinary
        ones would take registers that aren't there. The interpreter has no TF32."""
        precision: Any = None
        if a.dtype == jnp.float32:
            precision = lax.Precision.HIGHEST if self.interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return plt.dot(a, b, trans_b=trans_b, precision=precision)


def columns_of(context: Context) -> jax.Array:
    """head_dim padded to a power of two, and to what a product takes."""
    return jnp.arange(max(16, power_of_two(context.k_ref.shape[-1])))


def initial(size: int, columns: int, sinks: jax.Array | None = None) -> Running:
    """Nothing seen yet, or a sink's logit [size], whose value is zero."""
    out = jnp.zeros((size, columns), jnp.float32)
    if sinks is None:
        return Running(jnp.full((size,), MASKED, jnp.float32), jnp.zeros((size,), jnp.float32), out)
    return Running(sinks * LOG2_E, jnp.ones((size,), jnp.float32), out)


def finished(state: Running) -> jax.Array:
    """The attention output [size, columns]; zero for queries that saw nothing."""
    return state.out / jnp.where(state.total == 0, 1.0, state.total)[:, None]


def walk(
    state: Running,
    q: jax.Array,
    context: Context,
    span: tuple[jax.Array, jax.Array],
    how: Walk,
    *,
    seen: Callable[[jax.Array], jax.Array] | None = None,
    whole: bool = False,
) -> Running:
    """`state` after the tokens of `span` (first, end); q is [size, columns].

    `seen(keys)` [size or 1, tile_kv] says which keys a query sees beyond those in the span; None: all of them. `whole`
    promises that the span is made of whole tiles.
    """
    first, end = span

    def step(i: jax.Array, state: Running) -> Running:
        keys = first + i * how.tile_kv + jnp.arange(how.tile_kv)
        live = None if whole else keys < end
        k, v, k_scale, v_scale = _tile(context, keys, live, q.dtype)
        scores = how.dot(q, k, trans_b=True) * (how.scale if how.softcap else how.scale * LOG2_E)
        if k_scale is not None:
            scores = scores * k_scale[None]
        if how.softcap is not None:
            scores = jnp.tanh(scores / how.softcap) * (how.softcap * LOG2_E)
        shown = live if live is None else live[None]
        if seen is not None:
            shown = seen(keys) if shown is None else seen(keys) & shown
        if shown is not None:
            scores = jnp.where(shown, scores, MASKED)
        return _fold(state, scores, v, v_scale, how)

    return lax.fori_loop(0, lax.div(jnp.maximum(end - first, 0) + how.tile_kv - 1, how.tile_kv), step, state)


def _fold(state: Running, scores: jax.Array, v: jax.Array, v_scale: jax.Array | None, how: Walk) -> Running:
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=1))
    decay, weights = jnp.exp2(state.peak - peak), jnp.exp2(scores - peak[:, None])
    total = state.total * decay + jnp.sum(weights, axis=1)
    if v_scale is not None:
        weights = weights * v_scale[None]
    out = state.out * decay[:, None] + how.dot(weights.astype(v.dtype), v)
    return Running(peak, total, out)


def _tile(
    context: Context, keys: jax.Array, live: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """K and V [tile_kv, columns] at the tokens `keys`, zero where not `live`, and their scales [tile_kv], if any."""
    num_blocks, block_size, head_dim = context.k_ref.shape[0], *context.k_ref.shape[3:]
    places = lax.shift_right_logical(keys, int(log2(block_size)))
    blocks = plt.load(context.table_ref.at[context.row, places], **_masked(live, 0))
    blocks = jnp.minimum(jnp.maximum(blocks, 0), num_blocks - 1)
    offsets, columns = keys & (block_size - 1), columns_of(context)
    inside = None if live is None else jnp.broadcast_to(live[:, None], (keys.size, columns.size))
    if columns.size != head_dim:
        real = jnp.broadcast_to((columns < head_dim)[None], (keys.size, columns.size))
        inside = real if inside is None else inside & real
    where = (blocks[:, None], context.layer, context.head, offsets[:, None], columns[None])
    scales = (None, None)
    if context.k_scale_ref is not None:
        at = (blocks, context.layer, context.head, offsets)
        scales = tuple(plt.load(x.at[at], **_masked(live, 0.0)) for x in (context.k_scale_ref, context.v_scale_ref))
    k, v = (plt.load(x.at[where], **_masked(inside, jnp.zeros((), x.dtype))) for x in (context.k_ref, context.v_ref))
    # Weights that carry V's scales may be too small for float16; every quantised number is exact in bfloat16.
    product = jnp.bfloat16 if scales[0] is not None and dtype == jnp.float16 else dtype
    return k.astype(dtype), v.astype(product), *scales


def _masked(mask: jax.Array | None, other: float) -> dict[str, Any]:
    return {} if mask is None else {"mask": mask, "other": other}
