"""Which tokens min_p, top_k and top_p keep: exact thresholds without a sort.

Floats map to unsigned integers in the same order, and the largest integer t with "at least top_k tokens lie at or above
t" (for top_p: "the mass at or above t reaches top_p") is found bit by bit, highest bit first, until no row's set can
change: one pass over the row a bit. Tokens that tie with the last one kept are kept too. The passes run over the
likeliest blocks of tokens where these are sure to hold the answer, and over the whole row where not.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 16  # tokens
_NUM_CANDIDATE_BLOCKS = 256


class Wishes(NamedTuple):
    """What to keep of each row, [rows]: `top_k` tokens (0: all), then `top_p` of the weight (1: all)."""

    top_k: jax.Array
    top_p: jax.Array


class Scale(NamedTuple):
    """What turns a row's logits into weights relative to its likeliest token. All [rows]."""

    top: jax.Array
    temperature: jax.Array
    min_p: jax.Array


def weigh(logits: jax.Array, scale: Scale) -> jax.Array:
    """exp((logits - top) / temperature) of [rows, …] logits, 0 where min_p drops."""
    top, temperature, min_p = (jnp.expand_dims(x, range(1, logits.ndim)) for x in scale)
    weights = jnp.exp((logits - top) / temperature)
    return jnp.where(weights >= min_p, weights, 0.0)


def find_threshold(blocks: jax.Array, maxima: jax.Array, scale: Scale, wishes: Wishes) -> jax.Array:
    """The least ordered integer [rows] that top_k and then top_p keep. Rows that ask for neither get 0."""
    vocab = blocks.shape[1] * blocks.shape[2]
    wants_k, wants_p = (wishes.top_k > 0) & (wishes.top_k < vocab), wishes.top_p < 1.0

    def exact() -> jax.Array:
        logits = blocks.reshape(blocks.shape[0], -1)
        weights = weigh(logits, scale)
        limits = _Limits(wishes.top_k, wants_k, wishes.top_p, wants_p, jnp.sum(weights, -1))
        return _search(ordered_bits(logits), weights, limits)[0]

    def narrowed() -> jax.Array:
        limits = _Limits(wishes.top_k, wants_k, wishes.top_p, wants_p, jnp.sum(weigh(blocks, scale), (1, 2)))
        threshold, is_exact = _search_likeliest(blocks, maxima, scale, limits)
        return lax.cond(jnp.all(is_exact), lambda: threshold, lambda: jnp.where(is_exact, threshold, exact()))

    search = narrowed if blocks.shape[1] > 2 * _NUM_CANDIDATE_BLOCKS else exact
    return lax.cond(jnp.any(wants_k | wants_p), search, lambda: jnp.zeros(len(wishes.top_k), jnp.uint32))


class _Limits(NamedTuple):
    """What to keep of each row: `k` tokens if `wants_k`, of them `share` of the weight if `wants_p`. `total` is the
    weight of the whole row. All [rows]."""

    k: jax.Array
    wants_k: jax.Array
    share: jax.Array
    wants_p: jax.Array
    total: jax.Array


def _search(order: jax.Array, weights: jax.Array, limits: _Limits) -> tuple[jax.Array, jax.Array]:
    """(threshold, weight that top_p asks for), [rows] each, among [rows, n] tokens."""
    by_count = _count_threshold(order, jnp.where(limits.wants_k, limits.k, order.shape[1]))
    by_count = jnp.where(limits.wants_k, by_count, 0)
    weights = jnp.where(order >= by_count[:, None], weights, 0.0)
    need = limits.share * jnp.where(limits.wants_k, jnp.sum(weights, -1), limits.total)
    by_mass = jnp.where(limits.wants_p, _mass_threshold(order, weights, need, limits.wants_p), 0)
    return jnp.maximum(by_count, by_mass), need


def _search_likeliest(
    blocks: jax.Array, maxima: jax.Array, scale: Scale, limits: _Limits
) -> tuple[jax.Array, jax.Array]:
    """(threshold, whether it is exact) from the blocks with the largest maxima: 12 times fewer tokens at a vocabulary
    of 49,152. It is exact where their tokens at or above the least of those maxima suffice, for all such tokens but
    equals lie in these blocks."""
    maxima, chosen = lax.top_k(maxima, _NUM_CANDIDATE_BLOCKS)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], 1).reshape(blocks.shape[0], -1)
    order, weights, floor = ordered_bits(candidates), weigh(candidates, scale), ordered_bits(maxima[:, -1])
    threshold, need = _search(order, weights, limits)
    is_sure = order >= floor[:, None]
    enough_k = ~limits.wants_k | (jnp.sum(is_sure, -1, dtype=jnp.int32) >= limits.k)
    enough_p = ~limits.wants_p | limits.wants_k | (jnp.sum(jnp.where(is_sure, weights, 0.0), -1) >= need)
    wants = limits.wants_k | limits.wants_p
    return jnp.where(wants, jnp.maximum(threshold, floor), 0), enough_k & enough_p


def ordered_bits(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _count_threshold(order: jax.Array, k: jax.Array) -> jax.Array:
    """The largest t [rows] with at least k [rows] of `order` [rows, vocab] at or above t, or one with the same set."""

    def body(carry):
        bit, threshold, count = carry
        candidate = threshold | bit
        above = jnp.sum(order >= candidate[:, None], -1, dtype=jnp.int32)
        enough = above >= k
        return bit >> 1, jnp.where(enough, candidate, threshold), jnp.where(enough, above, count)

    def undecided(carry):
        bit, _, count = carry
        return (bit != 0) & jnp.any(count != k)

    zeros = jnp.zeros(order.shape[0], jnp.uint32)
    start = (jnp.uint32(0x80000000), zeros, jnp.full(order.shape[0], order.shape[1], jnp.int32))
    return lax.while_loop(undecided, body, start)[1]


def _mass_threshold(order: jax.Array, weights: jax.Array, need: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest t [rows] at or above which `weights` reach `need` [rows], or one with the same set: a token is kept
    exactly if those above it weigh less than that. Rows not `wanted` hold up nothing and get anything."""

    def body(carry):
        bit, threshold, low, high = carry
        candidate = threshold | bit
        above = order >= candidate[:, None]
        enough = jnp.sum(jnp.where(above, weights, 0.0), -1) >= need
        count = jnp.sum(above, -1, dtype=jnp.int32)
        threshold = jnp.where(enough, candidate, threshold)
        return bit >> 1, threshold, jnp.where(enough, count, low), jnp.where(enough, high, count)

    def undecided(carry):
        # low - high tokens lie between the threshold and the last candidate that was too high; one is the last kept.
        bit, _, low, high = carry
        return (bit != 0) & jnp.any(wanted & (low - high > 1))

    num_rows, num_tokens = order.shape
    counts = jnp.full(num_rows, num_tokens, jnp.int32), jnp.zeros(num_rows, jnp.int32)
    start = (jnp.uint32(0x80000000), jnp.zeros(num_rows, jnp.uint32), *counts)
    return lax.while_loop(undecided, body, start)[1]


def split_blocks(x: jax.Array, fill: float) -> jax.Array:
    """[rows, vocab] -> [rows, blocks, BLOCK], the end filled."""
    padding = -x.shape[1] % BLOCK
    x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill) if padding else x
    return x.reshape(x.shape[0], -1, BLOCK)
