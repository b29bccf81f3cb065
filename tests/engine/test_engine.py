"""The step loop's body over a counting device: what callers get, and what is left behind."""

import random

import pytest

from pagedjax.core.errors import RequestError
from pagedjax.core.invariants import check
from pagedjax.core.phases import Phase
from pagedjax.core.request import SamplingParams
from pagedjax.engine.outputs import EngineError, add_update, empty_output
from tests.engine.fakes import EOS, POISON, make_engine, num_preemptions, texts


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 5, **fields})


def run(engine, prompt, sampling=None, request_id="r"):
    """One request to its end, as a RequestOutput."""
    request = engine.prepare(prompt, sampling or params(), request_id=request_id)
    output = empty_output(request)
    engine.add(request)
    while engine.has_work:
        for update in engine.step():
            add_update(output, update)
        check(engine.state)
    return output


def assert_nothing_is_left(engine) -> None:
    check(engine.state)
    assert not engine.state.running and not engine.state.waiting.places and not engine.state.in_flight
    assert not engine.state.pool.counts and not engine.state.pending
    assert not engine.runner.sampled and not engine.runner.slots and len(engine.runner.tokens) == 0
    assert not engine.runner.staged


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_request_gets_its_tokens_and_leaves_nothing_behind(async_scheduling):
    engine = make_engine(async_scheduling=async_scheduling)
    output = run(engine, "abc")
    assert output.outputs[0].text == "defgh"
    assert output.outputs[0].finish_reason == "length" and output.finished
    assert_nothing_is_left(engine)


def test_the_end_of_sequence_token_stops_and_has_no_text():
    output = run(make_engine(), "89", params(max_tokens=20))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (" ", "stop")
    assert output.outputs[0].token_ids[-1] == EOS and output.outputs[0].stop_reason is None


def test_a_late_stop_costs_one_discarded_token_and_never_a_wrong_output():
    engine = make_engine()
    assert run(engine, "89", params(max_tokens=20)).outputs[0].token_ids == [62, EOS]
    assert engine.metrics.discarded_tokens._value.get() == 1
    assert_nothing_is_left(engine)


def test_ignore_eos_goes_on_past_it():
    output = run(make_engine(), "9", params(ignore_eos=True, max_tokens=4))
    assert output.outputs[0].token_ids == [62, 63, 0, 1]


def test_a_stop_string_across_tokens_is_cut_out_and_named():
    output = run(make_engine(), "abc", params(stop=["fgh", "zzz"], max_tokens=20))
    assert output.outputs[0].text == "de"
    assert output.outputs[0].stop_reason == "fgh" and output.outputs[0].finish_reason == "stop"


def test_a_stop_string_stays_in_if_asked():
    output = run(make_engine(), "abc", params(stop="fgh", include_stop_str_in_output=True, max_tokens=20))
    assert output.outputs[0].text == "defgh"


def test_a_stop_token_id_is_named_and_not_shown():
    output = run(make_engine(), "abc", params(stop_token_ids=[5], max_tokens=20))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("de", 5)


def test_n_sequences_share_the_prompts_blocks_and_differ_in_index():
    engine = make_engine()
    output = run(engine, "abcdefghi", params(n=3))
    assert [c.text for c in output.outputs] == ["jklmn"] * 3
    assert engine.metrics.cached_tokens._value.get() == 2 * 8


def test_many_requests_at_once_give_what_each_gives_alone():
    engine = make_engine(num_gpu_blocks_override=12)
    prompts = ["abcdefghij"[: 1 + i % 9] for i in range(24)]
    requests = [engine.prepare(p, params(max_tokens=12), request_id=f"{i:02}") for i, p in enumerate(prompts)]
    alone = [run(make_engine(), p, params(max_tokens=12)).outputs[0].text for p in prompts]
    assert texts(engine, requests) == alone
    assert num_preemptions(engine) > 0
    assert_nothing_is_left(engine)


def test_abort_frees_everything_by_the_last_step_that_contains_it():
    engine = make_engine()
    engine.add(engine.prepare("abc", params(max_tokens=50, n=2), request_id="r"))
    engine.step()
    engine.abort("r")
    assert {s.phase for s in engine.state.running} == {Phase.ABORTING}
    num_steps = 0
    while engine.has_work:
        assert engine.step() == []
        num_steps += 1
    assert num_steps <= 2
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("seed", range(8))
def test_arrivals_aborts_faults_and_preemptions_in_any_order_leave_nothing(seed):
    rng = random.Random(seed)
    engine = make_engine(num_gpu_blocks_override=12)
    for i in range(60):
        prompt = [rng.choice((POISON, 1, 2, 3)), *range(rng.randrange(12))]
        wish = params(max_tokens=rng.randrange(1, 30), n=rng.choice((1, 1, 3)), ignore_eos=True)
        engine.add(engine.prepare(prompt, wish, request_id=str(i)))
        for _ in range(rng.randrange(3)):
            engine.step()
        if rng.random() < 0.4:
            engine.abort(str(rng.randrange(i + 1)))
        check(engine.state)
    while engine.has_work:
        engine.step()
    assert num_preemptions(engine) > 0
    assert_nothing_is_left(engine)


def test_abort_while_waiting_and_twice_is_harmless():
    engine = make_engine(max_num_seqs=1)
    for name in ("first", "second"):
        engine.add(engine.prepare("abc", params(), request_id=name))
    engine.step()
    engine.abort("second")
    engine.abort("second")
    engine.abort("never here")
    engine.abort_all()
    assert_nothing_is_left(engine)


def test_logits_that_are_not_finite_end_only_their_own_request():
    engine = make_engine()
    good = engine.prepare("abc", params(), request_id="good")
    bad = engine.prepare([POISON, 1], params(n=2), request_id="bad")
    output = empty_output(good)
    engine.add(bad)
    engine.add(good)
    errors = []
    while engine.has_work:
        for update in engine.step():
            if update.request_id == "bad":
                errors.append(update.error)
            else:
                add_update(output, update)
    assert output.outputs[0].text == "defgh"
    assert errors and all(isinstance(error, EngineError) for error in errors)
    assert_nothing_is_left(engine)


def test_blocks_of_a_failed_row_are_not_shared():
    engine = make_engine()
    engine.add(engine.prepare([POISON, *range(8)], params(), request_id="bad"))
    while engine.has_work:
        engine.step()
    assert not engine.state.pool.cached
    assert_nothing_is_left(engine)


def test_an_engine_whose_step_failed_goes_on():
    engine = make_engine()
    engine.runner.fail_at_plan = 1
    assert run(engine, "abc").outputs[0].text == "defgh"
    assert engine.runner.num_resets == 2
    assert_nothing_is_left(engine)


def test_a_device_that_fails_every_step_ends_the_engine():
    engine = make_engine()
    engine.runner.dispatch = broken
    for i in range(40):
        engine.add(engine.prepare("abc", params(), request_id=str(i)))
    with pytest.raises(EngineError, match=r"17 steps in a row failed.*the device is gone"):
        run_to_the_end(engine)
    for _ in range(2):
        with pytest.raises(EngineError, match="cannot go on"):
            engine.step()


def run_to_the_end(engine):
    while engine.has_work:
        engine.step()


def broken(plan):
    raise RuntimeError("the device is gone")


def test_a_device_that_cannot_start_over_ends_the_engine():
    engine = make_engine()
    engine.runner.die_at_plan = 1
    engine.add(engine.prepare("abc", params(), request_id="r"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_to_the_end(engine)
    with pytest.raises(EngineError, match="cannot go on"):
        engine.step()


def test_a_step_that_is_broken_off_ends_the_engine():
    engine = make_engine()
    engine.add(engine.prepare("abc", params(), request_id="r"))
    engine.runner.dispatch = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineError, match="cannot go on"):
        engine.step()


def interrupted(plan):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"),
    [("a" * 60, 5, "context_length_exceeded"), ("a" * 40, 20, "prompt_exceeds_kv_cache")],
)
def test_what_can_never_run_is_refused_with_a_code_and_leaves_nothing(prompt, max_tokens, code):
    engine = make_engine(num_gpu_blocks_override=12)
    request = engine.prepare(prompt, params(max_tokens=max_tokens), request_id="r")
    for door in (lambda one: engine.check([one]), engine.add):
        with pytest.raises(RequestError) as refusal:
            door(request)
        assert refusal.value.code == code
    assert_nothing_is_left(engine)
    assert run(engine, "abc").outputs[0].text == "defgh"


def test_a_full_queue_refuses_all_n_sequences_or_none():
    engine = make_engine(max_queued_requests=2)
    with pytest.raises(RequestError) as refusal:
        engine.add(engine.prepare("abc", params(n=3), request_id="r"))
    assert refusal.value.code == "queue_full"
    assert_nothing_is_left(engine)


def test_without_max_tokens_the_output_may_fill_the_context_or_the_cache():
    assert len(run(make_engine(), "a", params(max_tokens=None, ignore_eos=True)).outputs[0].token_ids) == 63
    small = make_engine(num_gpu_blocks_override=5)
    assert len(run(small, "a", params(max_tokens=None, ignore_eos=True)).outputs[0].token_ids) == 20
    assert_nothing_is_left(small)


@pytest.mark.parametrize("prompt", ["", [], [64], [-1], [True], ["a"], [1.0]])
def test_a_prompt_that_is_no_token_ids_is_refused(prompt):
    with pytest.raises(RequestError):
        make_engine().prepare(prompt, params(), request_id="r")


@pytest.mark.parametrize("fields", [{"logit_bias": {64: 1.0}}, {"stop_token_ids": [64]}])
def test_token_ids_beyond_the_vocabulary_are_refused_in_every_field(fields):
    with pytest.raises(RequestError, match=next(iter(fields))):
        make_engine().prepare("abc", params(**fields), request_id="r")


def test_a_request_id_in_use_is_refused_and_the_first_one_goes_on():
    engine = make_engine()
    request = engine.prepare("abc", params(), request_id="r")
    engine.add(request)
    with pytest.raises(RequestError):
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert_nothing_is_left(engine)


def test_an_aborted_requests_id_may_be_used_again_while_it_leaves():
    engine = make_engine()
    for _ in range(4):
        engine.add(engine.prepare("abc", params(max_tokens=50), request_id="r"))
        engine.step()
        engine.abort("r")
    for _ in range(2):
        engine.step()
    assert_nothing_is_left(engine)


def test_generated_blocks_are_found_by_a_prompt_that_continues_them():
    engine = make_engine()
    first = run(engine, "abcd", params(max_tokens=9))
    again = run(engine, first.prompt_token_ids + first.outputs[0].token_ids, request_id="again")
    assert again.num_cached_tokens == 12
