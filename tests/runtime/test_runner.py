"""A tiny model through the runner: what is batched, chunked, preempted or in flight changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.core.errors import SchedulerError
from pagedjax.core.plan import Row, StepPlan
from pagedjax.models.stack import init_caches
from pallas_kernels import native
from pallas_kernels.matmul import pack_floats
from pallas_kernels.ragged_attention import Ragged, xla
from tests.runtime.tiny import CONFIG, POISON, SCHEDULER, generate, make_model, make_runner, params

PROMPTS = [[5, 9, 2, 40, 17, 33, 8, 100, 3], [7], [250, 251, 252, 253, 254], [60, 61, 60, 61, 60, 61, 60]]
WISHES = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 1.5},
    "truncated": {"temperature": 2.0, "top_k": 50, "top_p": 0.95, "min_p": 0.001},
    "penalties": {"temperature": 1.2, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "biased": {"temperature": 0, "logit_bias": {5: 4.0, 6: -100}, "min_tokens": 4},
    "logprobs": {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2},
}


@pytest.fixture(scope="module")
def warm():
    runner = make_runner()
    runner.warm_up()
    return runner


@pytest.fixture
def runner(warm):
    warm.reset()
    return warm


def ids(done):
    return [one.ids for one in done]


def test_greedy_tokens_are_the_models_own(runner):
    model = make_model()
    for prompt, found in zip(PROMPTS, ids(generate(runner, PROMPTS, params(temperature=0)))):
        assert found == dense_greedy(model, prompt, 8)


def dense_greedy(model, prompt, num_tokens):
    """The whole context computed anew for each token, as one chunk in an empty cache."""

    @jax.jit
    def next_token(token_ids, n):
        caches = init_caches(CONFIG, xla.BACKEND, num_blocks=1, block_size=32, dtype=jnp.float32)
        positions = jnp.arange(32, dtype=jnp.int32)
        slots = jnp.where(positions < n, positions, -1)
        ragged = Ragged(jnp.zeros((1, 1), jnp.int32), jnp.stack([0 * n, n]), n[None], slots, jnp.where(n == 1, 1, 0))
        hidden, _ = model(token_ids, positions, caches, ragged)
        return jnp.argmax(model.logits(hidden)[n - 1])

    known = list(prompt)
    for _ in range(num_tokens):
        padded = np.array(known + [0] * (32 - len(known)), np.int32)
        known.append(int(next_token(padded, np.int32(len(known)))))
    return known[len(prompt) :]


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES.keys())
def test_chunks_batches_and_steps_in_flight_change_nothing(runner, wish):
    expected = generate(runner, PROMPTS, params(**wish), ahead=0)
    assert [len(one.ids) for one in expected] == [8] * 4
    assert ids(generate(runner, PROMPTS, params(**wish), chunk=5)) == ids(expected)
    assert ids(generate(runner, PROMPTS, params(**wish), ahead=1)) == ids(expected)
    alone = [generate(runner, [prompt], params(**wish), seed=i)[0] for i, prompt in enumerate(PROMPTS)]
    assert ids(alone) == ids(expected)


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES.keys())
@pytest.mark.parametrize("after", [1, 4])
def test_preempted_sequences_resume_as_if_never_stopped(runner, wish, after):
    expected = generate(runner, PROMPTS, params(**wish))
    resumed = generate(runner, PROMPTS, params(**wish), preempt_after=after)
    assert ids(resumed) == ids(expected)
    for one, other in zip(expected, resumed):
        assert one.prompt_logprobs.keys() == other.prompt_logprobs.keys()


def test_a_seed_gives_the_same_tokens_in_any_slot_and_company(runner):
    wish = params(temperature=2.0, seed=3)
    alone = generate(runner, [PROMPTS[0]], wish, seed=3)[0].ids
    others = [params(**WISHES[name]) for name in ("penalties", "greedy", "logprobs")]
    together = generate(runner, [*PROMPTS[1:], PROMPTS[0]], [*others, wish], seed=0)
    assert together[3].ids == alone
    assert generate(runner, [PROMPTS[0]], wish, seed=4)[0].ids != alone


def test_penalties_keep_tokens_from_coming_back(runner):
    free = generate(runner, [PROMPTS[3]], params(temperature=0, max_tokens=20))[0].ids
    held = generate(
        runner, [PROMPTS[3]], params(temperature=0, max_tokens=20, frequency_penalty=2.0, presence_penalty=2.0)
    )
    assert len(set(held[0].ids)) > len(set(free))


def test_stop_ids_wait_for_min_tokens(runner):
    wish = {"temperature": 0, "logit_bias": {0: 100.0}}  # the driver's stop id is 0
    assert generate(runner, [PROMPTS[0]], params(**wish))[0].ids == [0] * 8
    held = generate(runner, [PROMPTS[0]], params(**wish, min_tokens=3))[0].ids
    assert 0 not in held[:3]
    assert held[3:] == [0] * 5


def test_prompt_logprobs_are_those_the_tokens_had_when_sampled(runner):
    first = generate(runner, [PROMPTS[0]], params(temperature=0, logprobs=0))[0]
    again = [*PROMPTS[0], *first.ids]
    for chunk in (16, 5):
        scored = generate(runner, [again], params(max_tokens=1, prompt_logprobs=0), chunk=chunk)[0].prompt_logprobs
        assert list(scored) == list(range(1, len(again)))
        found = [scored[len(PROMPTS[0]) + i] for i in range(8)]
        assert np.allclose(found, first.logprobs, atol=1e-4)


def test_a_sequence_whose_logits_are_no_numbers_is_flagged_and_leaves_nothing_behind(runner):
    expected = generate(runner, PROMPTS, params(temperature=0))
    assert not any(one.faulty for one in expected)
    together = generate(runner, [*PROMPTS[:3], [4, POISON, 8]], params(temperature=0))
    assert [one.faulty for one in together] == [False, False, False, True]
    assert ids(together)[:3] == ids(expected)[:3]
    # The blocks that it used serve others as before.
    assert ids(generate(runner, PROMPTS, params(temperature=0))) == ids(expected)


@pytest.mark.skipif(native.unavailable() is not None, reason="no layout here finds the likeliest tokens by itself")
def test_rows_that_want_the_likeliest_token_alone_get_it_without_logits():
    runner = make_runner(pack=pack_floats)
    runner.warm_up()
    assert runner.programs.sizes("argmax") == list(runner.shapes.row_sizes)
    prompts = [*PROMPTS[:3], [4, POISON, 8]]
    by_logits = generate(runner, prompts, params(temperature=0, logprobs=0))
    alone = generate(runner, prompts, params(temperature=0))
    assert ids(alone) == ids(by_logits)
    assert [one.faulty for one in alone] == [False, False, False, True]
    beside = generate(runner, PROMPTS[:3], [params(temperature=0), params(temperature=0, logprobs=0), params(seed=1)])
    assert ids(beside)[:2] == ids(alone)[:2]


def test_on_a_cpu_the_weights_of_norms_are_in_the_programs_and_not_handed_over_each_step(runner):
    assert [leaf.ndim for leaf in runner._parts.forward_leaves if leaf.ndim < 2] == []


def test_nothing_compiles_after_warm_up(runner):
    before = runner.recompiles  # other tests of this process compile
    for wish in WISHES.values():
        generate(runner, PROMPTS, params(**wish), chunk=7)
    generate(runner, PROMPTS, [params(**WISHES[name]) for name in ("random", "biased", "logprobs", "penalties")])
    assert runner.recompiles == before
    assert runner.num_step_programs == len(runner.shapes.token_sizes) <= 16


def test_a_compilation_after_warm_up_is_counted(runner):
    before = runner.recompiles
    jax.jit(lambda x: x * 3 + before)(np.zeros(7 + before)).block_until_ready()
    assert runner.recompiles == before + 1
    runner.warm_up()  # compiles nothing, counts afresh
    assert runner.recompiles == 0


def test_the_cache_stays_where_it_is(runner):
    before = runner.cache_pointers()
    generate(runner, PROMPTS, params(**WISHES["logprobs"]), preempt_after=3)
    assert runner.cache_pointers() == before
    assert len(before) > 0


def test_a_refused_plan_leaves_the_runner_as_it_was(runner):
    expected = ids(generate(runner, PROMPTS, params(temperature=0)))
    runner.tokens.add(10_000, [1, 2], params(), seed=0)
    with pytest.raises(SchedulerError, match="not all in"):
        runner.dispatch(StepPlan(0, (Row(10_000, 0, 2, (SCHEDULER.num_blocks,), True),)))
    with pytest.raises(SchedulerError, match="do not cover"):
        runner.dispatch(StepPlan(0, (Row(10_000, 0, 2, (), True),)))
    runner.release(10_000)
    runner.tokens.drop(10_000)
    assert ids(generate(runner, PROMPTS, params(temperature=0))) == expected


def test_dispatch_before_warm_up_is_refused():
    cold = make_runner()
    cold.tokens.add(1, [1, 2], params(), seed=0)
    with pytest.raises(SchedulerError, match="warm_up"):
        cold.dispatch(StepPlan(0, (Row(1, 0, 2, (0,), True),)))


def test_a_row_that_does_not_sample_has_no_token(runner):
    runner.tokens.add(20_000, [1, 2, 3], params(), seed=0)
    result = runner.step(StepPlan(7, (Row(20_000, 0, 2, (0,), False),)))
    assert (result.plan_id, result.ids, result.faulty) == (7, [-1], [False])
    assert result.logprobs is None
    assert result.prompt_logprobs == {}
    runner.release(20_000)
    runner.tokens.drop(20_000)


def test_steps_of_decodes_alone_run_their_own_programs(runner, monkeypatch):
    expected = ids(generate(runner, PROMPTS, params(temperature=0), chunk=5))
    apart = make_runner(backend=dataclasses.replace(xla.BACKEND, prefers_decode_programs=True))
    apart.warm_up()
    assert apart.programs.sizes("decode") == [1, 8]
    ran = []
    monkeypatch.setattr(type(apart.programs), "__getitem__", lambda self, key: ran.append(key) or self._compiled[key])
    assert ids(generate(apart, PROMPTS, params(temperature=0), chunk=5)) == expected
    assert {name for name, _ in ran} >= {"step", "decode"}
    assert ("decode", 8) in ran


def test_a_step_is_dispatched_without_looking_at_anything_of_the_device(runner, monkeypatch):
    """Whatever brings an array's values to the host, or waits for it, is forbidden meanwhile."""
    runner.tokens.add(30_000, [1, 2, 3], params(max_tokens=4, **WISHES["penalties"]), seed=0)
    first = runner.dispatch(StepPlan(0, (Row(30_000, 0, 3, (0, 1), True),)))

    def guarded(function):
        def call(value, *args, **options):
            assert not isinstance(value, jax.Array), "the host waits for the device"
            return function(value, *args, **options)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((np, "asarray"), (np, "array"), (jax, "device_get"), (jax, "block_until_ready")):
            patch.setattr(module, name, guarded(getattr(module, name)))
        with pytest.raises(AssertionError, match="waits"):
            runner.collect(first)
        second = runner.dispatch(StepPlan(1, (Row(30_000, 3, 1, (0, 1), True),)))
    assert len(runner.collect(first).ids) == len(runner.collect(second).ids) == 1
    runner.release(30_000)
    runner.tokens.drop(30_000)
