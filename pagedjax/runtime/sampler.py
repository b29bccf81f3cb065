"""From logits to token ids, as small device programs over [rows, vocab]; rows are independent of each other.

The order is vLLM's: logit_bias and min_tokens, repetition, frequency and presence penalties (`adjust`), then
temperature, min_p, top_k, and top_p on what is left, renormalised (`sample`).

Thresholds are exact. Floats map to unsigned integers in the same order, and the largest integer t with "at least
top_k tokens lie at or above t" (for top_p: "the mass at or above t reaches top_p") is found bit by bit, highest bit
first, until no row's set can change: no sort, one pass over the row a bit. Tokens that tie with the last one kept
are kept too. The pick inverts the cumulative distribution in two levels, blocks and then one block's tokens.

Random numbers: one uniform a row from fold_in(key(seed), position of the new token), so that neither the row's place
in the batch, nor its slot, nor a preemption changes what is drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

FAULTY = -1  # the id of a row whose logits are not finite
GREEDY_BELOW = 1e-5  # temperatures below are greedy, as in vLLM
_BLOCK = 16
_NUM_CANDIDATE_BLOCKS = 256

_INTS = ("slot", "position", "suppress", "top_k", "seed_high", "seed_low")
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")
NUM_FIELDS = len(_INTS) + len(_FLOATS)

# Penalty state, one int32 a slot and token: the output count above two flags.
IN_PROMPT, SUPPRESSED, COUNT_SHIFT = 1, 2, 2


class Rows(NamedTuple):
    """How to sample each row; every field is [rows]. Built by `encode`, packed as int32 [rows, NUM_FIELDS]."""

    slot: jax.Array
    position: jax.Array
    suppress: jax.Array
    top_k: jax.Array
    seed_high: jax.Array
    seed_low: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    frequency: jax.Array
    presence: jax.Array


def encode(params: SamplingParams, seed: int, slot: int) -> np.ndarray:
    """One row's packed fields (int32 [NUM_FIELDS]); `position` and `suppress` are left 0 for the step to fill."""
    temperature = 0.0 if params.temperature < GREEDY_BELOW else params.temperature
    words = np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    top_k = min(max(params.top_k, 0), 2**31 - 1)
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    floats = np.array([temperature, params.top_p, params.min_p, *penalties], np.float32)
    return np.concatenate([np.array([slot, 0, 0, top_k], np.int32), words, floats.view(np.int32)])


def needs_adjusting(params: SamplingParams) -> bool:
    """Whether logits must pass through `adjust`, that is, whether the sequence has penalty state on the device."""
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or bool(params.logit_bias)
        or params.min_tokens > 0
    )


def penalty_state(
    prompt_ids: np.ndarray, output_ids: np.ndarray, suppressed: tuple[int, ...], vocab_size: int
) -> np.ndarray:
    """A slot's row of the penalty state (int32 [vocab]): a pure function of the ids, so a resumed sequence gets what
    it had."""
    state = np.bincount(output_ids, minlength=vocab_size).astype(np.int32) << COUNT_SHIFT
    state[prompt_ids] |= IN_PROMPT
    state[[token_id for token_id in suppressed if token_id < vocab_size]] |= SUPPRESSED
    return state


def bias_entries(params: SamplingParams, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """logit_bias as (ids int32, values float32), both [MAX_LOGIT_BIAS]; ids past the entries are `vocab_size`."""
    bias = params.logit_bias or {}
    ids, values = np.full(MAX_LOGIT_BIAS, vocab_size, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
    ids[: len(bias)], values[: len(bias)] = list(bias), list(bias.values())
    return ids, values


def adjust(
    logits: jax.Array, state: jax.Array, packed: jax.Array, bias_ids: jax.Array, bias_values: jax.Array
) -> jax.Array:
    """Logits [rows, vocab] after bias, suppression and penalties; rows that ask for none keep their bits.

    `state` is [slots, vocab] (see `penalty_state`), `bias_ids` and `bias_values` [rows, MAX_LOGIT_BIAS].
    """
    rows = unpack(packed)
    state = state[rows.slot]
    count = state >> COUNT_SHIFT
    seen = (count > 0) | ((state & IN_PROMPT) != 0)
    row_index = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    x = logits.at[row_index, bias_ids].add(bias_values, mode="drop")
    x = jnp.where((rows.suppress[:, None] != 0) & ((state & SUPPRESSED) != 0), -jnp.inf, x)
    repetition = rows.repetition[:, None]
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - rows.frequency[:, None] * count.astype(jnp.float32)
    return x - jnp.where(count > 0, rows.presence[:, None], 0.0)


def count_sampled(state: jax.Array, last_ids: jax.Array, slots: jax.Array) -> jax.Array:
    """Penalty state [slots, vocab] (donated) with the ids just sampled for `slots` [rows] counted. Padding names the
    last slot, which no sequence has."""
    return state.at[slots, last_ids[slots]].add(1 << COUNT_SHIFT)


def write_state(state: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
    """Penalty state (donated) with one slot's row [vocab] replaced."""
    return lax.dynamic_update_slice(state, row[None], (slot, jnp.int32(0)))


def uniforms(packed: jax.Array) -> jax.Array:
    """One number in [0, 1) a row, from its seed and the new token's position alone."""
    rows = unpack(packed)
    words = lax.bitcast_convert_type(jnp.stack([rows.seed_high, rows.seed_low], 1), jnp.uint32)
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)))(keys, rows.position)


def greedy(logits: jax.Array, last_ids: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(ids [rows], last_ids [slots] with them filled in): the likeliest token, the lowest id of equals."""
    blocks = _blocks(logits, -jnp.inf)
    maxima, top = _maxima(blocks)
    return _store(_first_equal(blocks, maxima, top), top, last_ids, unpack(packed).slot)


def sample(
    logits: jax.Array, last_ids: jax.Array, packed: jax.Array, uniform: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Like `greedy` for rows of temperature 0; the others are drawn from the truncated distribution.

    `uniform` [at least rows] is what `uniforms` gave for these rows.
    """
    rows = unpack(packed)
    blocks = _blocks(logits, -jnp.inf)
    maxima, top = _maxima(blocks)
    scale = _Scale(top, jnp.where(rows.temperature == 0.0, 1.0, rows.temperature), rows.min_p)
    picked = _pick(blocks, scale, _threshold(blocks, maxima, scale, rows), uniform[: len(top)])
    ids = jnp.where(rows.temperature == 0.0, _first_equal(blocks, maxima, top), picked)
    return _store(ids, top, last_ids, rows.slot)


def score(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Log-probabilities under softmax(logits), packed as int32 [rows, 2 + 2 k]; see `unpack_scores`.

    `ids` [rows] are the tokens to score, k = min(MAX_LOGPROBS, vocab) alternatives come likeliest first.
    """
    num_alternatives = min(MAX_LOGPROBS, logits.shape[1])
    top = jnp.max(logits, -1, keepdims=True)
    log_total = top + jnp.log(jnp.sum(jnp.exp(logits - top), -1, keepdims=True))
    own = jnp.take_along_axis(logits, jnp.maximum(ids, 0)[:, None], 1)
    rank = 1 + jnp.sum(logits > own, -1, keepdims=True, dtype=jnp.int32)
    values, alternatives = _largest(logits, num_alternatives)
    bits = lax.bitcast_convert_type(jnp.concatenate([own, values], 1) - log_total, jnp.int32)
    return jnp.concatenate([rank, bits, alternatives], 1)


class Scores(NamedTuple):
    """Log-probabilities on the host, one row a token. Column 0 of `ids` and `logprobs` [rows, 1 + k] is the token
    itself, whose rank (1 = likeliest) is in `ranks` [rows]; the k likeliest tokens follow."""

    ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


def unpack_scores(packed: np.ndarray, ids: np.ndarray) -> Scores:
    """What `score` packed, for the same `ids`."""
    k = (packed.shape[1] - 2) // 2
    logprobs = np.ascontiguousarray(packed[:, 1 : 2 + k]).view(np.float32)
    return Scores(np.concatenate([ids[:, None], packed[:, 2 + k :]], 1), logprobs, packed[:, 0].copy())


def unpack(packed: jax.Array) -> Rows:
    """The fields of int32 [rows, NUM_FIELDS], floats reinterpreted."""
    ints = [packed[:, i] for i in range(len(_INTS))]
    floats = [lax.bitcast_convert_type(packed[:, len(_INTS) + i], jnp.float32) for i in range(len(_FLOATS))]
    return Rows(*ints, *floats)


def _maxima(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit of each block [rows, blocks] and of each row [rows], NaN where the row holds one."""
    # XLA:CPU's max passes over NaN.
    num_nan = jnp.sum(jnp.where(jnp.isnan(blocks), 1.0, 0.0), (1, 2))
    maxima = jnp.max(blocks, -1)
    return maxima, jnp.where(num_nan > 0, jnp.nan, jnp.max(maxima, -1))


def _first_equal(blocks: jax.Array, maxima: jax.Array, top: jax.Array) -> jax.Array:
    """The lowest index [rows] of `top`. Two small passes: XLA:CPU's own argmax takes ten times as long as a max."""
    block = _first(maxima == top[:, None])
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    return block * _BLOCK + _first(inside == top[:, None])


def _store(ids: jax.Array, top: jax.Array, last_ids: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    is_sound = jnp.isfinite(top)
    last_ids = last_ids.at[slot].set(jnp.where(is_sound, ids, 0))
    return jnp.where(is_sound, ids, FAULTY), last_ids


class _Scale(NamedTuple):
    """What turns a row's logits into weights relative to its likeliest token. All [rows]."""

    top: jax.Array
    temperature: jax.Array
    min_p: jax.Array


def _weigh(logits: jax.Array, scale: _Scale) -> jax.Array:
    """exp((logits - top) / temperature) of [rows, …] logits, 0 where min_p drops."""
    top, temperature, min_p = (jnp.expand_dims(x, range(1, logits.ndim)) for x in scale)
    weights = jnp.exp((logits - top) / temperature)
    return jnp.where(weights >= min_p, weights, 0.0)


def _threshold(blocks: jax.Array, maxima: jax.Array, scale: _Scale, rows: Rows) -> jax.Array:
    """The least ordered integer [rows] that top_k and then top_p keep. Rows that ask for neither get 0."""
    vocab = blocks.shape[1] * blocks.shape[2]
    wants_k, wants_p = (rows.top_k > 0) & (rows.top_k < vocab), rows.top_p < 1.0

    def exact() -> jax.Array:
        logits = blocks.reshape(blocks.shape[0], -1)
        weights = _weigh(logits, scale)
        limits = _Limits(rows.top_k, wants_k, rows.top_p, wants_p, jnp.sum(weights, -1))
        return _search(_ordered_bits(logits), weights, limits)[0]

    def narrowed() -> jax.Array:
        limits = _Limits(rows.top_k, wants_k, rows.top_p, wants_p, jnp.sum(_weigh(blocks, scale), (1, 2)))
        threshold, is_exact = _search_likeliest(blocks, maxima, scale, limits)
        return lax.cond(jnp.all(is_exact), lambda: threshold, lambda: jnp.where(is_exact, threshold, exact()))

    search = narrowed if blocks.shape[1] > 2 * _NUM_CANDIDATE_BLOCKS else exact
    return lax.cond(jnp.any(wants_k | wants_p), search, lambda: jnp.zeros(len(rows.slot), jnp.uint32))


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
    blocks: jax.Array, maxima: jax.Array, scale: _Scale, limits: _Limits
) -> tuple[jax.Array, jax.Array]:
    """(threshold, whether it is exact) from the blocks with the largest maxima: 12 times fewer tokens at a vocabulary
    of 49,152. It is exact where their tokens at or above the least of those maxima suffice, for all such tokens but
    equals lie in these blocks."""
    maxima, chosen = lax.top_k(maxima, _NUM_CANDIDATE_BLOCKS)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], 1).reshape(blocks.shape[0], -1)
    order, weights, floor = _ordered_bits(candidates), _weigh(candidates, scale), _ordered_bits(maxima[:, -1])
    threshold, need = _search(order, weights, limits)
    is_sure = order >= floor[:, None]
    enough_k = ~limits.wants_k | (jnp.sum(is_sure, -1, dtype=jnp.int32) >= limits.k)
    enough_p = ~limits.wants_p | limits.wants_k | (jnp.sum(jnp.where(is_sure, weights, 0.0), -1) >= need)
    wants = limits.wants_k | limits.wants_p
    return jnp.where(wants, jnp.maximum(threshold, floor), 0), enough_k & enough_p


def _ordered_bits(x: jax.Array) -> jax.Array:
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


def _pick(blocks: jax.Array, scale: _Scale, threshold: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index [rows] where the cumulative weight of the kept tokens first exceeds uniform x total."""
    totals = jnp.sum(_kept(blocks, scale, threshold), -1)
    ends = _running_sum(totals)
    target = uniform * ends[:, -1]
    block = _first_above(ends, totals, target)
    start = jnp.take_along_axis(ends - totals, block[:, None], 1)[:, 0]
    inside = _kept(jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0], scale, threshold)
    return block * _BLOCK + _first_above(_running_sum(inside), inside, target - start)


def _kept(logits: jax.Array, scale: _Scale, threshold: jax.Array) -> jax.Array:
    threshold = jnp.expand_dims(threshold, range(1, logits.ndim))
    return jnp.where(_ordered_bits(logits) >= threshold, _weigh(logits, scale), 0.0)


def _first_above(ends: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """The first index of a positive weight whose end exceeds `target`; the last positive one when rounding leaves
    none. A token of weight 0 is never picked."""
    positive = weights > 0
    index = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    return jnp.minimum(_first(positive & (ends > target[:, None])), jnp.max(jnp.where(positive, index, 0), -1))


def _running_sum(x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, -1)


def _first(found: jax.Array) -> jax.Array:
    """The lowest index [rows] where `found` [rows, n] holds, n where nowhere."""
    index = lax.broadcasted_iota(jnp.int32, found.shape, 1)
    return jnp.min(jnp.where(found, index, found.shape[1]), -1)


def _largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """(values, ids), [rows, k] each, largest first. The k blocks with the largest maxima hold the k largest."""
    blocks = _blocks(x, -jnp.inf)
    if blocks.shape[1] <= k:
        return lax.top_k(x, k)
    _, chosen = lax.top_k(jnp.max(blocks, -1), k)
    chosen = jnp.sort(chosen, -1)  # ids ascend, so equals keep the lowest id first
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], 1).reshape(x.shape[0], -1)
    values, where = lax.top_k(candidates, k)
    return values, jnp.take_along_axis(chosen, where // _BLOCK, 1) * _BLOCK + where % _BLOCK


def _blocks(x: jax.Array, fill: float) -> jax.Array:
    """[rows, vocab] -> [rows, blocks, _BLOCK], the end filled."""
    padding = -x.shape[1] % _BLOCK
    x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill) if padding else x
    return x.reshape(x.shape[0], -1, _BLOCK)
