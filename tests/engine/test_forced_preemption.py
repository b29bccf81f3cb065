"""A real runner under an engine that is made to preempt: outputs do not show it, whatever the way."""

import pytest

from pagedjax.core.request import SamplingParams
from pagedjax.llm import LLM
from tests.engine.fakes import num_preemptions
from tests.engine.forcing import KINDS, num_fetched_bytes, run_forced, use
from tests.engine.golden import CASES, num_certain_tokens

PROMPTS = [[5, 9, 2, 40, 17, 33, 8, 100, 3], [7], [250, 251, 252, 253, 254], [60, 61, 60, 61, 60, 61, 60]]
WISHES = {
    "greedy": {"temperature": 0},
    "seeded with penalties": {
        "temperature": 1.3,
        "seed": 11,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
    },
    "scored": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_models_outputs_do_not_show_preemption(tiny_engine, kind, wish):
    use(tiny_engine, kind, num_blocks=64)
    pointers, recompiles = tiny_engine.runner.cache_pointers(), tiny_engine.runner.recompiles
    expected = run_forced(tiny_engine, requests_for(tiny_engine, wish), every=0)
    use(tiny_engine, kind, num_blocks=14)
    before, fetched = num_preemptions(tiny_engine), num_fetched_bytes(tiny_engine)
    assert run_forced(tiny_engine, requests_for(tiny_engine, wish), every=2) == expected
    assert num_preemptions(tiny_engine) - before > 5
    assert (num_fetched_bytes(tiny_engine) > fetched) == (kind != "recompute")
    assert tiny_engine.runner.cache_pointers() == pointers
    assert tiny_engine.runner.recompiles == recompiles
    assert tiny_engine.runner.staging_bytes == 0


def requests_for(engine, wish):
    params = SamplingParams(max_tokens=24, **wish)
    return [engine.prepare(prompt, params, request_id=str(i)) for i, prompt in enumerate(PROMPTS)]


def test_a_step_that_fails_costs_no_prompt_logprob(tiny_engine):
    use(tiny_engine, "host", num_blocks=64)
    (request,) = requests_for(tiny_engine, WISHES["scored"])[:1]
    expected = scores(tiny_engine, request)
    collect = tiny_engine.runner.collect
    failures = iter([RuntimeError("the device fell over")])

    def failing(handle):
        for failure in failures:
            raise failure
        return collect(handle)

    tiny_engine.runner.collect = failing
    assert scores(tiny_engine, request) == expected
    assert next(failures, None) is None


def scores(engine, request):
    engine.add(request)
    found = []
    while engine.has_work:
        found += [(update.delta.token_ids, update.prompt_logprobs) for update in engine.step()]
    return [ids for ids, _ in found], [list(entry or {}) for entry in found[-1][1]]


@pytest.fixture(scope="module")
def llm(smollm2_path, tmp_path_factory):
    return LLM(
        str(smollm2_path),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=64,
        swap_space=0.05,
        swap_space_disk=0.05,
        swap_dir=str(tmp_path_factory.mktemp("swap")),
        show_progress_bars=False,
    )


SHORT = [case for case in CASES if len(case["prompt_ids"]) <= 64][:6]
NUM_TOKENS = 20


@pytest.mark.parametrize("kind", KINDS)
def test_the_real_models_greedy_tokens_do_not_show_preemption(llm, kind):
    engine = llm.engine
    use(engine, kind, num_blocks=9)
    before, fetched = num_preemptions(engine), num_fetched_bytes(engine)
    found = run_forced(engine, requests_for_cases(engine, temperature=0), every=1)
    assert num_preemptions(engine) - before > 10
    assert (num_fetched_bytes(engine) > fetched) == (kind != "recompute")
    for case, ids in zip(SHORT, found, strict=True):
        num_certain = num_certain_tokens(case)
        assert ids[:num_certain] == case["greedy_ids"][:NUM_TOKENS][:num_certain]


def test_the_real_models_seeded_samples_do_not_show_preemption(llm):
    engine, wish = llm.engine, {**WISHES["seeded with penalties"], "temperature": 0.8}
    use(engine, "both", num_blocks=64)
    expected = run_forced(engine, requests_for_cases(engine, **wish), every=0)
    use(engine, "both", num_blocks=9)
    before = num_preemptions(engine)
    assert run_forced(engine, requests_for_cases(engine, **wish), every=2) == expected
    assert num_preemptions(engine) - before > 5


def requests_for_cases(engine, **wish):
    params = SamplingParams(max_tokens=NUM_TOKENS, **wish)
    return [engine.prepare(case["prompt_ids"], params, request_id=str(i)) for i, case in enumerate(SHORT)]
