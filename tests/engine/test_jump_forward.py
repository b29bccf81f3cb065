"""Jump-forward: what a grammar forces comes out sooner, and nothing else changes by it."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from pagedjax.cli.replay import replay
from pagedjax.core.events import StepDone
from pagedjax.core.request import SamplingParams
from pagedjax.core.scheduler import update
from pagedjax.core.structure import StructuredOutputsParams
from pagedjax.engine import rows
from pagedjax.engine.grammar import GrammarState
from pagedjax.engine.record import Recorder, read
from tests.engine.fakes import run
from tests.engine.forcing import KINDS, run_forced, use

# What stands between the free letters is forced.
FORM = "name [a-f]{1,3} surname [a-f]{1,3} at [0-9]{1,2} Main St"
ANSWER = "the answer is 42 beyond a doubt"
PROMPTS = [[5, 9, 2, 40, 17, 33, 8, 100, 3], [7], [250, 251, 252, 253, 254], [60, 61, 60, 61, 60, 61, 60]]


def shaped(regex, **options):
    options = {"temperature": 1.5, "seed": 5, "max_tokens": 48, **options}
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex), **options)


@pytest.fixture
def engine(tiny_engine):
    before = tiny_engine.state
    use(tiny_engine, "recompute", num_blocks=64)
    yield tiny_engine
    tiny_engine.state = before


@contextmanager
def one_by_one():
    """Every token is sampled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarState, "forced", lambda self: None)
        yield


def counted(engine, name):
    return engine.metrics.registry.get_sample_value(f"pagedjax_{name}")


def requests(engine, params):
    return [engine.prepare(prompt, one, request_id=str(i)) for i, (prompt, one) in enumerate(zip(PROMPTS, params))]


def outcome(engine, params, prompt=PROMPTS[0]):
    """(ids, text, finish reason, stop reason) of each sample, and the steps that they took."""
    before = counted(engine, "steps_total")
    output, _ = run(engine, prompt, params)
    found = [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]
    return found, counted(engine, "steps_total") - before


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("ahead", [True, False])
def test_the_tokens_are_those_that_would_be_sampled_in_fewer_steps(engine, ahead, temperature):
    engine.state = engine.state._replace(config=replace(engine.state.config, async_scheduling=ahead))
    params = shaped(FORM, temperature=temperature)
    with one_by_one():
        expected, num_steps = outcome(engine, params)
    found, num_fewer = outcome(engine, params)
    assert found == expected
    assert num_fewer < num_steps - 20


def test_samples_go_their_own_ways_behind_what_is_forced(engine):
    params = shaped(FORM, n=3)
    with one_by_one():
        expected, _ = outcome(engine, params)
    assert outcome(engine, params)[0] == expected
    assert len({text for _, text, *_ in expected}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_in_the_midst_of_a_run_does_not_show(tiny_engine, kind):
    params = [shaped(FORM, seed=i) for i in range(3)] + [SamplingParams(temperature=1.5, seed=4, max_tokens=30)]
    use(tiny_engine, kind, num_blocks=64)
    with one_by_one():
        expected = run_forced(tiny_engine, requests(tiny_engine, params), every=0)
    use(tiny_engine, kind, num_blocks=22)
    for seed in range(3):
        found = run_forced(tiny_engine, requests(tiny_engine, params), every=2, seed=seed)
        assert found == expected


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"max_tokens": 9}, "the answe", "length"),
        ({"stop": ["swer"]}, "the an", "stop"),
        ({"stop": ["swer"], "include_stop_str_in_output": True}, "the answer", "stop"),
        ({"stop_token_ids": [22]}, "the ans", "stop"),
        ({"max_tokens": None}, ANSWER, "stop"),
    ],
)
def test_what_is_forced_behind_an_end_is_dropped(engine, options, text, reason):
    params = shaped(ANSWER, **options)
    with one_by_one():
        expected, _ = outcome(engine, params)
    assert outcome(engine, params)[0] == expected
    ((_, found, why, _),) = expected
    assert (found, why) == (text, reason)


@pytest.mark.parametrize("options", [{"logprobs": 2}, {"frequency_penalty": 1.0}, {"min_tokens": 4}, {"best_of": 2}])
def test_tokens_that_must_be_sampled_are(engine, options):
    params, before = shaped(FORM, **options), counted(engine, "jump_forward_tokens_total")
    with one_by_one():
        expected, num_steps = outcome(engine, params)
    assert outcome(engine, params) == (expected, num_steps)
    assert counted(engine, "jump_forward_tokens_total") == before


def new_tokens(engine, num_requests):
    """How many tokens each delta has, step by step, where so many want the same answer at once."""
    for request in requests(engine, [shaped(ANSWER)] * num_requests):
        engine.add(request)
    steps = []
    while engine.has_work:
        steps.append([len(update.delta.token_ids) for update in engine.step()])
    return [found for found in steps if found]


def test_what_is_forced_comes_in_one_piece_and_is_counted_once(engine):
    names = ("generation_tokens_total", "jump_forward_tokens_total", "time_to_first_token_seconds_count")
    before = [counted(engine, name) for name in names]
    engine.add(engine.prepare(PROMPTS[0], shaped(ANSWER), request_id="one"))
    deltas = []
    while engine.has_work:
        deltas += [update.delta for update in engine.step()]
    assert [(delta.text, len(delta.token_ids)) for delta in deltas] == [(ANSWER, len(ANSWER))]
    assert [counted(engine, name) - old for name, old in zip(names, before)] == [len(ANSWER), len(ANSWER) - 1, 1]


def test_a_long_text_is_forced_in_parts_so_that_no_step_waits_for_long(engine, monkeypatch):
    expected, num_steps = outcome(engine, shaped(ANSWER))
    assert num_steps == 2
    monkeypatch.setattr(rows, "MAX_SPLIT", 2 * len(ANSWER))
    found, num_more = outcome(engine, shaped(ANSWER))
    assert found == expected
    assert num_more > 2 * num_steps


def test_what_is_forced_is_sampled_while_it_is_longer_than_a_step_may_split(engine, monkeypatch):
    monkeypatch.setattr(rows, "MAX_SPLIT", len(ANSWER) - 4)
    assert new_tokens(engine, 1)[:4] == [[1], [1], [1], [2]]


def test_the_rows_of_a_step_share_what_it_may_split_and_the_next_step_has_it_anew(engine, monkeypatch):
    assert new_tokens(engine, 3) == [[len(ANSWER)] * 3]
    # As much as is split for one whole answer behind its first token.
    monkeypatch.setattr(rows, "MAX_SPLIT", sum(range(len(ANSWER))))
    first, second, *_ = new_tokens(engine, 3)
    assert first == [len(ANSWER), 1, 1]
    assert second == [len(ANSWER) - 1, 2]


def test_blocks_of_forced_tokens_are_found_by_their_names(engine):
    for context in (one_by_one, nullcontext):
        use(engine, "recompute", num_blocks=64)
        with context():
            output, _ = run(engine, PROMPTS[0], shaped(FORM + " [a-f]{3}"))
        whole = [*PROMPTS[0], *output.outputs[0].token_ids]
        again, _ = run(engine, whole, SamplingParams(max_tokens=1))
        size = engine.state.config.block_size
        assert again.num_cached_tokens == (len(whole) - 1) // size * size


def test_a_step_that_fails_in_the_midst_of_a_run_costs_no_token(engine):
    expected, _ = outcome(engine, shaped(FORM))
    collect = engine.runner.collect
    for failing in range(2, 9, 2):
        numbers = iter(range(1, 99))
        engine.runner.collect = lambda handle, at=failing, numbers=numbers: (
            collect(handle) if next(numbers) != at else _fall_over()
        )
        try:
            assert outcome(engine, shaped(FORM))[0] == expected
        finally:
            engine.runner.collect = collect


def _fall_over():
    raise RuntimeError("the device fell over")


def test_a_life_tells_no_recomputing_where_there_was_none(engine):
    outcome(engine, shaped(FORM))
    (story,) = engine.lives.find("r")
    words = [moment.event for moment in story.moments]
    assert words == ["queued", "admitted", "prefill", "first_token", "last_token", "finished"]


def test_a_recording_with_forced_tokens_replays(engine, tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "events")
    recorder.begin(engine.state.config)
    monkeypatch.setattr(engine, "_update", recorder.watch(update))
    outcome(engine, shaped(FORM))
    (session,) = read(tmp_path / "events")
    accepted = [
        row.num_accepted for _, event, _ in session.events if isinstance(event, StepDone) for row in event.results
    ]
    assert max(accepted) > 5 and 0 in accepted
    assert replay(session).difference is None


def test_greedy_answers_of_the_real_model_are_the_same(golden_llm):
    schema = {
        "type": "object",
        "properties": {
            "postal_address": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["administrator", "subscriber"]},
            "is_active_member": {"type": "boolean"},
        },
        "required": ["postal_address", "kind", "is_active_member"],
        "additionalProperties": False,
    }
    shape = StructuredOutputsParams(json=schema)
    params = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=shape)

    def answer():
        before = counted(golden_llm.engine, "steps_total")
        (output,) = golden_llm.generate("A user as JSON:", params, use_tqdm=False)
        return output.outputs[0].token_ids, counted(golden_llm.engine, "steps_total") - before

    with one_by_one():
        expected, num_steps = answer()
    found, num_fewer = answer()
    assert found == expected
    assert num_fewer < num_steps
