"""Beam search: a plain one in numpy over whole forwards is the reference, and nothing that befalls beams shows."""

from dataclasses import replace
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.core.errors import RequestError
from pagedjax.core.invariants import check
from pagedjax.core.request import MAX_BEAM_WIDTH, SamplingParams
from pagedjax.models.stack import init_caches
from pagedjax.weights import load
from pallas_kernels.ragged_attention import Ragged, xla
from tests.engine.fakes import num_preemptions, run
from tests.engine.forcing import KINDS, num_fetched_bytes, run_forced, use
from tests.runtime import tiny

PROMPT = [5, 9, 2, 40, 17, 33, 8, 100, 3, 77]
# With none of them a beam comes upon the token that has no embedding.
PROMPTS = [PROMPT, [7], [11], list(range(20, 40))]
BLOCK_SIZE = 4


def beam_search(log_probs, prompt, width, num_tokens, *, length_penalty=1.0, stops=()):
    """The reference: (log-probability, ids) of the best, to the very end: nothing is broken off."""
    live, done = [(0.0, ())], []
    for length in range(1, num_tokens + 1):
        offers = [(so_far + p, (*ids, i)) for so_far, ids in live for i, p in enumerate(log_probs(prompt, ids))]
        offers.sort(key=lambda offer: -offer[0])
        ends = [length == num_tokens or ids[-1] in stops for _, ids in offers]
        done += [offer for offer, is_end in zip(offers[:width], ends) if is_end]
        done = sorted(done, key=lambda one: -one[0] / len(one[1]) ** length_penalty)[:width]
        live = [offer for offer, is_end in zip(offers, ends) if not is_end][:width]
    return done


def dense(model, config, size):
    """Log-probabilities [vocab] of what follows, the whole context computed anew each time, as one chunk."""

    # The parameters are an argument: as constants they would be compiled in, and written to the compilation cache.
    graph, parameters = nnx.split(model)

    @jax.jit
    def logits(parameters, token_ids, n):
        model = nnx.merge(graph, parameters)
        caches = init_caches(config, xla.BACKEND, num_blocks=1, block_size=size, dtype=jnp.float32)
        positions = jnp.arange(size, dtype=jnp.int32)
        slots = jnp.where(positions < n, positions, -1)
        ragged = Ragged(jnp.zeros((1, 1), jnp.int32), jnp.stack([0 * n, n]), n[None], slots, jnp.where(n == 1, 1, 0))
        hidden, _ = model(token_ids, positions, caches, ragged)
        return model.logits(hidden[n - 1][None])[0]

    def log_probs(prompt, ids):
        known = [*prompt, *ids]
        found = np.asarray(
            logits(parameters, np.array(known + [0] * (size - len(known)), np.int32), jnp.int32(len(known)))
        )
        return found - found.max() - np.log(np.exp(found - found.max()).sum())

    cache = {}
    return lambda prompt, ids: cache.setdefault((tuple(prompt), ids), log_probs(prompt, ids))


@pytest.fixture(scope="module")
def log_probs():
    return dense(tiny.make_model(), tiny.CONFIG, 64)


def assert_equal(outputs, expected, params):
    assert [tuple(c.token_ids) for c in outputs] == [ids for _, ids in expected]
    assert [c.index for c in outputs] == list(range(len(expected)))
    for c, (logprob, _) in zip(outputs, expected, strict=True):
        assert c.cumulative_logprob == pytest.approx(logprob, abs=2e-3)
        assert c.finish_reason == ("stop" if c.token_ids[-1] in params.stop_token_ids else "length")


STOPS = tuple(range(0, 300, 7))
SEARCHES = {
    "two": {"beam_width": 2, "max_tokens": 12},
    "four": {"beam_width": 4, "max_tokens": 9},
    "one": {"beam_width": 1, "max_tokens": 7},
    "one token": {"beam_width": 4, "max_tokens": 1},
    "with stops": {"beam_width": 3, "max_tokens": 14, "stop_token_ids": STOPS},
    "long ones first": {"beam_width": 3, "max_tokens": 14, "stop_token_ids": STOPS, "length_penalty": 2.0},
    "short ones first": {"beam_width": 3, "max_tokens": 14, "stop_token_ids": STOPS, "length_penalty": -1.0},
    "by log-probability alone": {"beam_width": 3, "max_tokens": 14, "stop_token_ids": STOPS, "length_penalty": 0.0},
    "more beams than slots": {"beam_width": 7, "max_tokens": 6, "stop_token_ids": STOPS},
}


@pytest.fixture(params=[True, False], ids=["a step ahead", "step by step"])
def engine(tiny_engine, request):
    """Others want the engine as it was."""
    before = tiny_engine.state.config
    tiny_engine.state = tiny_engine.state._replace(config=replace(before, async_scheduling=request.param))
    yield tiny_engine
    tiny_engine.state = tiny_engine.state._replace(config=before)


@pytest.mark.parametrize("wish", SEARCHES.values(), ids=SEARCHES)
def test_beams_are_those_of_a_plain_search(engine, log_probs, wish):
    params = SamplingParams(**wish)
    for prompt in PROMPTS:
        use(engine, "recompute", num_blocks=64)
        output, _ = run(engine, prompt, params)
        penalty = params.length_penalty
        expected = beam_search(
            log_probs,
            prompt,
            params.beam_width,
            params.max_tokens,
            length_penalty=penalty,
            stops=params.stop_token_ids,
        )
        assert_equal(output.outputs, expected, params)


def test_early_stopping_ends_with_the_first_outputs_and_without_it_better_ones_come(tiny_engine):
    wish = {"beam_width": 3, "max_tokens": 14, "stop_token_ids": STOPS, "length_penalty": 2.0}
    use(tiny_engine, "recompute", num_blocks=64)
    early, _ = run(tiny_engine, PROMPT, SamplingParams(**wish, early_stopping=True))
    late, _ = run(tiny_engine, PROMPT, SamplingParams(**wish))
    assert [c.finish_reason for c in early.outputs] == ["stop"] * 3
    assert max(len(c.token_ids) for c in early.outputs) < max(len(c.token_ids) for c in late.outputs)


def test_a_search_ends_once_nothing_better_can_come(tiny_engine):
    use(tiny_engine, "recompute", num_blocks=64)
    steps = tiny_engine.metrics.steps._value.get()
    params = SamplingParams(beam_width=2, max_tokens=50, stop_token_ids=list(range(0, 300, 2)), length_penalty=0.0)
    run(tiny_engine, PROMPT, params)
    assert tiny_engine.metrics.steps._value.get() - steps < 20


@pytest.mark.parametrize("prompt_len", [1, 8, 9, 14])
@pytest.mark.parametrize("width", [2, 4])
def test_beams_hold_the_papers_number_of_blocks(tiny_engine, prompt_len, width):
    max_tokens = 11
    use(tiny_engine, "recompute", num_blocks=64)
    _, most = run(tiny_engine, list(range(prompt_len)), SamplingParams(beam_width=width, max_tokens=max_tokens))
    num_shared = prompt_len // BLOCK_SIZE
    assert most <= num_shared + width * (ceil((prompt_len + max_tokens) / BLOCK_SIZE) - num_shared)


@pytest.mark.parametrize("num_blocks", [12, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_beams_end_as_if_nothing_had_been(tiny_engine, log_probs, kind, num_blocks):
    params = SamplingParams(beam_width=4, max_tokens=10)
    prompts = {"x": PROMPT, "y": [60, 61, 60, 61, 60]}
    expected = [ids for prompt in prompts.values() for _, ids in beam_search(log_probs, prompt, 4, 10)]
    before, fetched = num_preemptions(tiny_engine), num_fetched_bytes(tiny_engine)
    recompiles = tiny_engine.runner.recompiles
    for seed in range(3):
        use(tiny_engine, kind, num_blocks=num_blocks)
        requests = [tiny_engine.prepare(prompt, params, request_id=name) for name, prompt in prompts.items()]
        assert [tuple(ids) for ids in run_forced(tiny_engine, requests, every=2, seed=seed)] == expected
    assert num_preemptions(tiny_engine) - before > 8
    assert (num_fetched_bytes(tiny_engine) > fetched) == (kind != "recompute")
    assert tiny_engine.runner.recompiles == recompiles and tiny_engine.runner.staging_bytes == 0


def test_beams_go_beside_other_requests(tiny_engine, log_probs):
    use(tiny_engine, "recompute", num_blocks=64)
    plain = SamplingParams(temperature=0, max_tokens=20)
    (alone,) = run_forced(tiny_engine, [tiny_engine.prepare(PROMPT, plain, request_id="a")], every=0)
    use(tiny_engine, "recompute", num_blocks=64)
    beams = SamplingParams(beam_width=3, max_tokens=10)
    requests = [
        tiny_engine.prepare(PROMPT, plain, request_id="a"),
        tiny_engine.prepare(PROMPT, beams, request_id="b"),
        tiny_engine.prepare(PROMPT, plain, request_id="c"),
    ]
    found = run_forced(tiny_engine, requests, every=0)
    assert found[0] == found[-1] == alone
    assert [tuple(ids) for ids in found[1:4]] == [ids for _, ids in beam_search(log_probs, PROMPT, 3, 10)]


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_frees_every_beam(tiny_engine, num_steps):
    use(tiny_engine, "host", num_blocks=12)
    params = SamplingParams(beam_width=4, max_tokens=20)
    tiny_engine.add(tiny_engine.prepare(PROMPT, params, request_id="r"))
    for _ in range(num_steps):
        tiny_engine.step()
    tiny_engine.abort("r")
    while tiny_engine.has_work:
        assert tiny_engine.step() == []
    check(tiny_engine.state)
    assert not tiny_engine.state.pool.counts and not tiny_engine.state.waiting.places and not tiny_engine.runner.tokens
    while tiny_engine.state.tiers.transfers:
        tiny_engine.step()


def test_a_step_that_fails_costs_beams_nothing(tiny_engine, log_probs):
    use(tiny_engine, "host", num_blocks=64)
    collect, num_collected = tiny_engine.runner.collect, 0

    def failing(handle):
        nonlocal num_collected
        num_collected += 1
        if num_collected in (3, 9):
            raise RuntimeError("the device fell over")
        return collect(handle)

    tiny_engine.runner.collect = failing
    try:
        output, _ = run(tiny_engine, PROMPT, SamplingParams(beam_width=4, max_tokens=9))
    finally:
        tiny_engine.runner.collect = collect
    assert num_collected > 9
    assert_equal(output.outputs, beam_search(log_probs, PROMPT, 4, 9), SamplingParams())


def test_logits_that_are_not_finite_end_the_whole_request(tiny_engine):
    use(tiny_engine, "recompute", num_blocks=64)
    params = SamplingParams(beam_width=2)
    tiny_engine.add(tiny_engine.prepare([tiny.POISON, 3], params, request_id="r"))
    errors = []
    while tiny_engine.has_work:
        errors += [update.error for update in tiny_engine.step()]
    assert len(errors) == 1 and "not finite" in str(errors[0])
    assert not tiny_engine.state.pool.counts and not tiny_engine.runner.tokens


def test_a_stop_string_that_spans_tokens_ends_a_beam(tiny_engine):
    use(tiny_engine, "recompute", num_blocks=64)
    wish = {"beam_width": 3, "max_tokens": 8}
    free, _ = run(tiny_engine, PROMPT, SamplingParams(**wish))
    stop = free.outputs[0].text[2:4]
    found, _ = run(tiny_engine, PROMPT, SamplingParams(**wish, stop=[stop], length_penalty=-5.0))
    ended = [c for c in found.outputs if c.stop_reason == stop]
    assert ended and all(stop not in c.text and c.finish_reason == "stop" for c in ended)
    kept, _ = run(
        tiny_engine,
        PROMPT,
        SamplingParams(**wish, stop=[stop], length_penalty=-5.0, include_stop_str_in_output=True),
    )
    assert [c.text for c in kept.outputs if c.stop_reason] == [c.text + stop for c in ended]


def test_no_beam_ends_before_min_tokens(tiny_engine):
    use(tiny_engine, "recompute", num_blocks=64)
    wish = {"beam_width": 3, "max_tokens": 12, "stop_token_ids": list(range(0, 300, 20)), "length_penalty": -5.0}
    soon, _ = run(tiny_engine, PROMPT, SamplingParams(**wish))
    late, _ = run(tiny_engine, PROMPT, SamplingParams(**wish, min_tokens=9))
    assert min(len(c.token_ids) for c in soon.outputs) < 9 < min(len(c.token_ids) for c in late.outputs)


def test_beams_carry_the_logprobs_of_their_tokens_and_of_the_prompt(tiny_engine):
    use(tiny_engine, "recompute", num_blocks=64)
    output, _ = run(tiny_engine, PROMPT, SamplingParams(beam_width=3, max_tokens=6, logprobs=2, prompt_logprobs=1))
    for completion in output.outputs:
        entries = [entry[token_id] for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert sum(entry.logprob for entry in entries) == pytest.approx(completion.cumulative_logprob, abs=1e-5)
        assert all(2 <= len(entry) <= 3 for entry in completion.logprobs)
        ranked = [[one.logprob for one in sorted(e.values(), key=lambda one: one.rank)] for e in completion.logprobs]
        assert ranked == [sorted(each, reverse=True) for each in ranked]
    assert len(output.prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": MAX_BEAM_WIDTH + 1}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "best_of": 4}, "best_of"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "top_k": 5}, "top_k"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2, "min_p": 0.5}, "min_p"),
        ({"beam_width": 2, "repetition_penalty": 1.5}, "repetition_penalty"),
        ({"beam_width": 2, "logit_bias": {3: 1.0}}, "logit_bias"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "never"}, "early_stopping"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_what_makes_no_sense_with_beams_is_refused_by_name(wish, param):
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**wish)
    assert refusal.value.param == param


def test_beams_that_are_not_to_be_preempted_are_refused(tiny_engine):
    with pytest.raises(RequestError) as refusal:
        tiny_engine.prepare(PROMPT, SamplingParams(beam_width=2), request_id="r", preemptible=False)
    assert refusal.value.param == "preemptible"


@pytest.mark.parametrize("prompt", ["The capital of France is", "def fibonacci(n):"])
def test_the_real_models_beams_are_those_of_a_plain_search(golden_llm, smollm2_path, prompt):
    with load.open_checkpoint(smollm2_path) as checkpoint:
        config = checkpoint.config
    model = load.load_model(smollm2_path, dtype="float32", backend=xla.BACKEND)
    (output,) = golden_llm.generate(prompt, SamplingParams(beam_width=4, max_tokens=8), use_tqdm=False)
    stops = golden_llm.get_tokenizer().eos_token_ids
    expected = beam_search(dense(model, config, 32), output.prompt_token_ids, 4, 8, stops=stops)
    assert [tuple(c.token_ids) for c in output.outputs] == [ids for _, ids in expected]
    for c, (logprob, _) in zip(output.outputs, expected, strict=True):
        assert c.cumulative_logprob == pytest.approx(logprob, abs=5e-3)
        assert c.text == golden_llm.get_tokenizer().decode(c.token_ids)
