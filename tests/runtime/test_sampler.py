"""Sampling against a plain float64 reference: same tokens kept, same token drawn."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.core.request import SamplingParams
from pagedjax.runtime import sampler

ROWS, SLOTS = 64, 80
SMALL, LARGE = 53, 10_007  # the large one is searched among the likeliest blocks first; neither fills its last block


def pack(params, *, seed=0, positions=0, slots=range(ROWS)):
    """Fields of one row a slot. `params` is one SamplingParams or a list."""
    every = params if isinstance(params, list) else [params] * len(slots)
    fields = np.stack([sampler.encode(row, seed, slot) for row, slot in zip(every, slots)])
    fields[:, 1] = positions
    return fields


@partial(jax.jit, static_argnums=0)
def run(function, *inputs):
    return function(*inputs)


def sample(logits, fields, uniform):
    ids, last_ids = run(sampler.sample, logits, np.zeros(SLOTS, np.int32), fields, np.asarray(uniform, np.float32))
    return np.asarray(ids), np.asarray(last_ids)


def reference(logits, params):
    """The distribution that is left, in float64, by sorting."""
    x = logits.astype(np.float64) / params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p] = 0
    if params.top_k > 0:
        p[p < np.sort(p)[::-1][min(params.top_k, len(p)) - 1]] = 0
    p /= p.sum()
    above = np.array([p[p > value].sum() for value in p])
    p[above >= params.top_p] = 0
    return p / p.sum()


def make_logits(vocab, spread=3.0, seed=0):
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


TRUNCATIONS = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 1000},
    {"top_k": 10**9, "top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.999999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.8},
    {"temperature": 0.5, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
]


@pytest.mark.parametrize("wishes", TRUNCATIONS, ids=str)
@pytest.mark.parametrize(("vocab", "spread"), [(SMALL, 3.0), (LARGE, 4.0), (LARGE, 0.1)])
def test_exactly_the_kept_tokens_are_drawn_each_from_its_share_of_the_uniform(vocab, spread, wishes):
    params = SamplingParams(**wishes)
    logits = make_logits(vocab, spread)
    p = reference(logits, params)
    # Float32 tells tokens of less than this apart no longer.
    kept = np.flatnonzero(p > 1e-5)
    some = np.random.default_rng(1).choice(kept, ROWS)
    middle = (np.cumsum(p) - p / 2)[some]
    ids, _ = sample(np.tile(logits, (ROWS, 1)), pack(params), middle)
    assert ids.tolist() == some.tolist()


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_the_ends_of_the_uniform_never_reach_a_dropped_token(vocab):
    params = SamplingParams(top_k=5)
    logits = make_logits(vocab)
    kept = np.flatnonzero(reference(logits, params))
    ends = np.where(np.arange(ROWS) % 2, 1 - 2**-24, 0.0)
    ids, _ = sample(np.tile(logits, (ROWS, 1)), pack(params), ends)
    assert ids.tolist() == [kept[0], kept[-1]] * (ROWS // 2)


def test_tokens_that_tie_with_the_last_kept_one_are_kept():
    logits = np.full(SMALL, -5.0, np.float32)
    logits[[3, 20, 40]] = 2.0
    ids, _ = sample(np.tile(logits, (ROWS, 1)), pack(SamplingParams(top_k=2)), np.linspace(0, 0.999, ROWS))
    assert set(ids.tolist()) == {3, 20, 40}


def test_a_row_is_drawn_alike_whatever_the_others_ask_for():
    wishes = [SamplingParams(**TRUNCATIONS[i % len(TRUNCATIONS)]) for i in range(ROWS)]
    logits = np.stack([make_logits(LARGE, seed=i, spread=[4.0, 0.1][i % 2]) for i in range(ROWS)])
    uniform = np.random.default_rng(0).random(ROWS)
    together, _ = sample(logits, pack(wishes), uniform)
    alone = [sample(logits[i : i + 2], pack(wishes[i : i + 2], slots=[0, 1]), uniform[i : i + 2])[0] for i in range(8)]
    assert [pair[0] for pair in alone] == together[:8].tolist()


def test_greedy_rows_take_the_lowest_of_equals_in_both_programs():
    logits = np.stack([make_logits(LARGE, seed=i) for i in range(ROWS)])
    logits[:, [9000, 17, 4000]] = 50.0
    fields = pack(SamplingParams(temperature=0))
    ids, last_ids = run(sampler.greedy, logits, np.zeros(SLOTS, np.int32), fields)
    assert np.asarray(ids).tolist() == [17] * ROWS
    assert np.asarray(last_ids).tolist() == [17] * ROWS + [0] * (SLOTS - ROWS)
    assert sample(logits, fields, np.full(ROWS, 0.9))[0].tolist() == [17] * ROWS


def test_greedy_and_random_rows_share_a_batch():
    logits = np.stack([make_logits(SMALL, seed=i) for i in range(ROWS)])
    wishes = [SamplingParams(temperature=i % 2) for i in range(ROWS)]
    ids, last_ids = sample(logits, pack(wishes, slots=range(ROWS)[::-1]), np.full(ROWS, 0.3))
    assert ids[::2].tolist() == logits[::2].argmax(1).tolist()
    assert ids[1::2].tolist() != logits[1::2].argmax(1).tolist()
    assert last_ids[:ROWS].tolist() == ids[::-1].tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_flagged_and_no_other(bad):
    logits = np.stack([make_logits(SMALL, seed=i) for i in range(ROWS)])
    expected, _ = sample(logits, pack(SamplingParams()), np.full(ROWS, 0.5))
    logits[5, 7] = bad
    ids, last_ids = sample(logits, pack(SamplingParams()), np.full(ROWS, 0.5))
    assert ids[5] == sampler.FAULTY
    assert last_ids[5] == 0
    assert np.delete(ids, 5).tolist() == np.delete(expected, 5).tolist()


def test_uniforms_depend_on_seed_and_position_alone():
    seeds, positions = [0, 1, 2**32 - 1, 7], [0, 5, 2**20, 3]
    fields = np.stack([sampler.encode(SamplingParams(), seed, slot) for slot, seed in enumerate(seeds)])
    fields[:, 1] = positions
    drawn = np.asarray(run(sampler.uniforms, fields))
    expected = [jax.random.uniform(jax.random.fold_in(jax.random.key(s), p)) for s, p in zip(seeds, positions)]
    assert drawn.tolist() == [float(u) for u in expected]
    fields[:, 0] = [60, 3, 9, 1]
    assert np.asarray(run(sampler.uniforms, fields[::-1].copy())).tolist() == drawn[::-1].tolist()


def test_all_64_bits_of_a_seed_count():
    seeds = [1, 1 + 2**32, 1 + 2**63, -1, 2**64 - 2]
    fields = np.stack([sampler.encode(SamplingParams(), seed, 0) for seed in seeds])
    assert len(set(np.asarray(run(sampler.uniforms, fields)).tolist())) == len(seeds)


def test_draws_over_positions_follow_the_distribution():
    params = SamplingParams(top_p=0.9, seed=11)
    logits = make_logits(SMALL, spread=1.0)
    drawn = []
    for start in range(0, 4096, ROWS):
        fields = pack(params, seed=11, positions=np.arange(start, start + ROWS))
        drawn.append(sample(np.tile(logits, (ROWS, 1)), fields, run(sampler.uniforms, fields))[0])
    expected = reference(logits, params) * 4096
    seen = np.bincount(np.concatenate(drawn), minlength=SMALL)
    assert seen[expected == 0].sum() == 0
    chi_square = ((seen - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square < (expected > 0).sum() + 5 * np.sqrt(2 * (expected > 0).sum())


PENALTIES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"logit_bias": {3: 5.0, 50: -100.0}},
    {"min_tokens": 4},
    {
        "repetition_penalty": 0.8,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.3,
        "logit_bias": {2: 1.0},
        "min_tokens": 9,
    },
]


@pytest.mark.parametrize("wishes", PENALTIES, ids=str)
def test_penalties_are_those_of_the_definition(wishes):
    params = SamplingParams(**wishes)
    prompt, output, stops = [1, 2, 3, 3], [3, 4, 4, 4, 50], (5, 6)
    logits = np.stack([make_logits(SMALL, seed=i) for i in range(ROWS)])
    expected = logits.astype(np.float64)
    for token_id, value in (params.logit_bias or {}).items():
        expected[:, token_id] += value
    expected[:, list(stops)] = -np.inf if params.min_tokens > len(output) else expected[:, list(stops)]
    for token_id in set(prompt) | set(output):
        column = expected[:, token_id]
        expected[:, token_id] = np.where(
            column > 0, column / params.repetition_penalty, column * params.repetition_penalty
        )
    for token_id in set(output):
        count = output.count(token_id)
        expected[:, token_id] -= params.frequency_penalty * count + params.presence_penalty
    assert np.allclose(adjusted(logits, params, prompt, output, stops), expected, rtol=1e-5, atol=1e-5)


def adjusted(logits, params, prompt, output, stops):
    vocab = logits.shape[1]
    row = sampler.penalty_state(np.array(prompt), np.array(output), stops, vocab)
    state = np.tile(row, (SLOTS, 1))
    fields = pack(params)
    fields[:, 2] = len(output) < params.min_tokens
    ids, values = sampler.bias_entries(params, vocab)
    return np.asarray(run(sampler.adjust, logits, state, fields, np.tile(ids, (ROWS, 1)), np.tile(values, (ROWS, 1))))


def test_a_row_without_penalties_keeps_its_bits_beside_one_that_has_them():
    logits = np.stack([make_logits(SMALL, seed=i) for i in range(ROWS)])
    assert (adjusted(logits, SamplingParams(), [1, 2], [3, 3], (4,)) == logits).all()


def test_counting_on_the_device_equals_rebuilding_from_the_tokens():
    prompt, output, stops = np.array([1, 2, 3]), [7, 7, 1, 9], (5,)
    state = jnp.asarray(np.tile(sampler.penalty_state(prompt, np.array([], int), stops, SMALL), (SLOTS, 1)))
    for token_id in output:
        last_ids = np.full(SLOTS, token_id, np.int32)
        slots = np.array([4, 6] + [SLOTS - 1] * 6, np.int32)
        state = run(sampler.count_sampled, state, last_ids, slots)
    rebuilt = sampler.penalty_state(prompt, np.array(output), stops, SMALL)
    assert np.asarray(state)[[4, 6]].tolist() == [rebuilt.tolist()] * 2
    assert np.asarray(state)[5].tolist() == sampler.penalty_state(prompt, np.array([], int), stops, SMALL).tolist()


@pytest.mark.parametrize("vocab", [12, SMALL, LARGE])
def test_scores_are_those_of_log_softmax(vocab):
    logits = np.stack([make_logits(vocab, seed=i) for i in range(ROWS)])
    ids = np.random.default_rng(2).integers(0, vocab, ROWS).astype(np.int32)
    scores = sampler.unpack_scores(np.asarray(run(sampler.score, logits, ids)), ids)
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(1, keepdims=True))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    assert scores.ids.tolist() == np.concatenate([ids[:, None], order], 1).tolist()
    assert np.allclose(scores.logprobs, np.take_along_axis(exact, scores.ids, 1), atol=1e-5)
    own = np.take_along_axis(exact, ids[:, None], 1)
    assert scores.ranks.tolist() == (1 + (exact > own).sum(1)).tolist()


def test_what_a_mask_forbids_is_impossible_and_the_rest_keeps_its_bits():
    logits = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    may = np.random.default_rng(1).random((3, 96)) < 0.5
    allowed = np.packbits(may, axis=1, bitorder="little").view(np.int32)
    assert allowed.shape == (3, sampler.num_mask_words(70))
    found = np.asarray(sampler.restrict(logits, allowed))
    assert np.array_equal(found, np.where(may[:, :70], logits, -np.inf))
