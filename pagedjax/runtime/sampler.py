"""From logits to token ids, as small device programs over [rows, vocab]; rows are independent of each other.

The order is vLLM's: logit_bias and min_tokens, repetition, frequency and presence penalties (`adjust`), then
what a grammar allows (`restrict`), temperature, min_p, top_k, and top_p on what is left, renormalised (`sample`).

The thresholds are exact (`truncation`). The pick inverts the cumulative distribution in two levels, blocks and then
one block's tokens.

Random numbers: one uniform a row from fold_in(key(seed), position of the new token), so that neither the row's place
in the batch, nor its slot, nor a preemption changes what is drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from pagedjax.runtime.truncation import BLOCK, Scale, Wishes, find_threshold, ordered_bits, split_blocks, weigh
from pallas_kernels.matmul import Largest

FAULTY = -1  # the id of a row whose logits are not finite
GREEDY_BELOW = 1e-5  # temperatures below are greedy, as in vLLM

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


def num_mask_words(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit for every token."""
    return -(-vocab_size // 32)


def restrict(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Logits [rows, vocab], -inf where the token's bit of `allowed` (int32 [rows, words], lowest first) is 0."""
    words = lax.bitcast_convert_type(allowed, jnp.uint32)
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return jnp.where(bits.reshape(len(logits), -1)[:, : logits.shape[1]] != 0, logits, -jnp.inf)


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
    blocks = split_blocks(logits, -jnp.inf)
    maxima, top = _maxima(blocks)
    return keep(Largest(_first_equal(blocks, maxima, top), top), last_ids, packed)


def keep(likeliest: Largest, last_ids: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `greedy` gives, from the likeliest tokens and their logits."""
    return _store(likeliest.output, likeliest.value, last_ids, unpack(packed).slot)


def sample(
    logits: jax.Array, last_ids: jax.Array, packed: jax.Array, uniform: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Like `greedy` for rows of temperature 0; the others are drawn from the truncated distribution.

    `uniform` [at least rows] is what `uniforms` gave for these rows.
    """
    rows = unpack(packed)
    blocks = split_blocks(logits, -jnp.inf)
    maxima, top = _maxima(blocks)
    scale = Scale(top, jnp.where(rows.temperature == 0.0, 1.0, rows.temperature), rows.min_p)
    threshold = find_threshold(blocks, maxima, scale, Wishes(rows.top_k, rows.top_p))
    picked = _pick(blocks, scale, threshold, uniform[: len(top)])
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
    return block * BLOCK + _first(inside == top[:, None])


def _store(ids: jax.Array, top: jax.Array, last_ids: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    is_sound = jnp.isfinite(top)
    last_ids = last_ids.at[slot].set(jnp.where(is_sound, ids, 0))
    return jnp.where(is_sound, ids, FAULTY), last_ids


def _pick(blocks: jax.Array, scale: Scale, threshold: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index [rows] where the cumulative weight of the kept tokens first exceeds uniform x total."""
    totals = jnp.sum(_kept(blocks, scale, threshold), -1)
    ends = _running_sum(totals)
    target = uniform * ends[:, -1]
    block = _first_above(ends, totals, target)
    start = jnp.take_along_axis(ends - totals, block[:, None], 1)[:, 0]
    inside = _kept(jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0], scale, threshold)
    return block * BLOCK + _first_above(_running_sum(inside), inside, target - start)


def _kept(logits: jax.Array, scale: Scale, threshold: jax.Array) -> jax.Array:
    threshold = jnp.expand_dims(threshold, range(1, logits.ndim))
    return jnp.where(ordered_bits(logits) >= threshold, weigh(logits, scale), 0.0)


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
    blocks = split_blocks(x, -jnp.inf)
    if blocks.shape[1] <= k:
        return lax.top_k(x, k)
    _, chosen = lax.top_k(jnp.max(blocks, -1), k)
    chosen = jnp.sort(chosen, -1)  # ids ascend, so equals keep the lowest id first
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], 1).reshape(x.shape[0], -1)
    values, where = lax.top_k(candidates, k)
    return values, jnp.take_along_axis(chosen, where // BLOCK, 1) * BLOCK + where % BLOCK
