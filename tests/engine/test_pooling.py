"""Embeddings: hidden states of the last token, or their mean, whatever else is in the batch."""

import numpy as np
import pytest

from pagedjax.core.request import SamplingParams
from tests.engine.forcing import preempt, use

PROMPTS = [[5, 9, 2, 40, 17, 33, 8, 100, 3] * 4, [7], [250, 251, 252, 253, 254], [60, 61, 60, 61, 60, 61, 60]]
WISH = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)


@pytest.fixture
def engine(tiny_engine):
    use(tiny_engine, "recompute", num_blocks=64)
    return tiny_engine


def embed(engine, prompts, pooling, *, rng=None, others=()):
    """The vector of each prompt; with `rng` somebody is preempted at half of the steps."""
    for request in others:
        engine.add(request)
    for i, prompt in enumerate(prompts):
        engine.add(engine.prepare(prompt, WISH, request_id=str(i), pooling=pooling))
    found = {}
    while engine.has_work:
        for update in engine.step():
            if update.embedding is not None:
                assert (update.delta.text, update.delta.token_ids) == ("", ())
                found[int(update.request_id)] = update.embedding
        if rng is not None and rng.random() < 0.5:
            preempt(engine, rng)
    return [found[i] for i in range(len(prompts))]


def test_the_last_hidden_state_is_what_the_head_reads(engine):
    parts = engine.runner._parts
    for prompt, vector in zip(PROMPTS, embed(engine, PROMPTS, "last")):
        logits = np.asarray(parts.head(parts.head_leaves, vector[None]))[0]
        engine.add(engine.prepare(prompt, WISH, request_id="one"))
        deltas = []
        while engine.has_work:
            deltas += [update.delta for update in engine.step()]
        (token_id,), (entry,) = deltas[0].token_ids, deltas[0].logprobs
        assert token_id == np.argmax(logits)
        expected = logits[token_id] - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()
        assert entry[token_id].logprob == pytest.approx(expected, abs=1e-4)


def test_the_mean_is_that_over_all_beginnings(engine):
    # The same prompt before: its blocks are cached, and yet all its tokens count.
    embed(engine, PROMPTS, "last")
    for prompt, mean in zip(PROMPTS, embed(engine, PROMPTS, "mean")):
        beginnings = [prompt[: i + 1] for i in range(len(prompt))]
        assert mean == pytest.approx(np.mean(embed(engine, beginnings, "last"), axis=0), abs=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_preemption_and_others_in_the_batch_do_not_show(tiny_engine, pooling):
    import random

    use(tiny_engine, "recompute", num_blocks=64)
    recompiles = tiny_engine.runner.recompiles
    expected = embed(tiny_engine, PROMPTS, pooling)
    for seed in range(4):
        use(tiny_engine, "recompute", num_blocks=16)
        others = [
            tiny_engine.prepare([i, 2, 3], SamplingParams(max_tokens=20), request_id=f"other {i}") for i in range(3)
        ]
        found = embed(tiny_engine, PROMPTS, pooling, rng=random.Random(seed), others=others)
        assert all(one == pytest.approx(wanted, abs=1e-5) for one, wanted in zip(found, expected))
    assert tiny_engine.runner.recompiles == recompiles


def test_a_step_that_fails_is_not_counted_twice(engine):
    expected = embed(engine, PROMPTS, "mean")
    collect, steps = engine.runner.collect, iter(range(100))

    def failing(handle):
        if next(steps) == 2:
            raise RuntimeError("the device fell over")
        return collect(handle)

    engine.runner.collect = failing
    try:
        found = embed(engine, PROMPTS, "mean")
    finally:
        engine.runner.collect = collect
    assert all(one == pytest.approx(wanted, abs=1e-5) for one, wanted in zip(found, expected))
