"""What the engine remembers of a request's life: every decision about it, in order, and no more than is bounded."""

import pytest

from pagedjax.engine import lives
from pagedjax.engine.lives import MAX_FIRST, MAX_LATEST
from tests.engine.fakes import make_engine
from tests.engine.test_engine import params, run
from tests.engine.test_swapping import crowded, prompts_of, run_all


def story(engine, request_id="r"):
    (found,) = engine.lives.find(request_id)
    return found


def words(found):
    return [moment.event for moment in found.moments]


def facts(found, word):
    return [moment.facts for moment in found.moments if moment.event == word]


def test_a_life_is_told_from_the_line_to_the_end_with_its_chunks():
    engine = make_engine()
    run(engine, list(range(40)), params(max_tokens=5))
    found = story(engine)
    assert words(found) == ["queued", "admitted", *["prefill"] * 3, "first_token", "last_token", "finished"]
    assert [(one["start"], one["tokens"]) for one in facts(found, "prefill")] == [(0, 16), (16, 16), (32, 8)]
    assert facts(found, "last_token") == [{"reason": "length", "output_tokens": 5}]
    times = [moment.at_us for moment in found.moments]
    assert times == sorted(times)
    assert (found.prompt_len, found.max_tokens, found.is_over, found.num_left_out) == (40, 5, True, 0)


def test_what_the_prefix_cache_had_is_told():
    engine = make_engine()
    for name in ("first", "second"):
        run(engine, list(range(20)), params(max_tokens=2), name)
    assert [facts(story(engine, name), "admitted")[0]["cached_tokens"] for name in ("first", "second")] == [0, 16]


@pytest.mark.parametrize("method", ["swap", "recompute"])
def test_preemptions_are_told_with_what_they_cost_and_how_it_went_on(method):
    engine = crowded(preemption_method=method)
    run_all(engine, prompts_of(4), params(max_tokens=30))
    victim = next(found for i in range(4) if "preempted" in words(found := story(engine, str(i))))
    (preempted, *_), told = facts(victim, "preempted"), words(victim)
    assert preempted["reason"] == "memory" and preempted["method"] == method
    assert (preempted["lost_tokens"] > 0) == (method == "recompute")
    after = told[told.index("preempted") :]
    assert "resumed" in after and "first_token" not in after
    if method == "swap":
        assert {"swap_out", "stored", "fetch", "fetched"} <= set(told)
    else:
        assert "recompute" in after


def test_a_request_that_is_dropped_says_so():
    engine = make_engine()
    engine.add(engine.prepare(list(range(8)), params(max_tokens=30), request_id="r"))
    engine.step()
    assert not story(engine).is_over
    engine.abort("r")
    while engine.has_work:
        engine.step()
    assert words(story(engine))[-2:] == ["aborted", "finished"]
    assert story(engine).is_over


def test_samples_and_beams_of_a_request_are_in_its_life():
    engine = make_engine()
    run(engine, [1, 2, 3], params(max_tokens=3, n=2), "samples")
    run(engine, [1, 2, 3], params(max_tokens=3, n=2, beam_width=2), "beams")
    assert words(story(engine, "samples")).count("last_token") == 2
    assert story(engine, "samples").is_over and story(engine, "beams").is_over
    assert words(story(engine, "beams")).count("finished") >= 2


def test_prompts_of_one_request_are_found_by_its_id():
    engine = make_engine()
    for name in ("cmpl-1-0", "cmpl-1-1", "cmpl-1-x", "cmpl-10"):
        run(engine, [1, 2, 3], params(max_tokens=1), name)
    assert [found.request_id for found in engine.lives.find("cmpl-1")] == ["cmpl-1-0", "cmpl-1-1"]
    assert engine.lives.find("nobody") == []


def test_an_id_that_is_used_again_tells_the_latest_life_only():
    engine = make_engine()
    for max_tokens in (2, 3):
        run(engine, [1, 2, 3], params(max_tokens=max_tokens))
    assert facts(story(engine), "last_token")[0]["output_tokens"] == 3


def test_long_lives_and_old_ones_are_forgotten(monkeypatch):
    monkeypatch.setattr(lives, "MAX_ENDED", 3)
    engine = make_engine(max_model_len=1024, max_num_batched_tokens=4, num_gpu_blocks_override=400)
    run(engine, [1] * 400, params(max_tokens=1), "long")
    found = story(engine, "long")
    assert len(found.moments) == MAX_FIRST + MAX_LATEST and words(found)[0] == "queued"
    assert found.num_left_out == 105 - len(found.moments) and words(found)[-1] == "finished"
    for i in range(6):
        run(engine, [1, 2, 3], params(max_tokens=1), str(i))
    known = [i for i in range(6) if engine.lives.find(str(i))]
    assert known == [3, 4, 5] and engine.lives.find("long") == []
    assert len(engine.lives._lives) == 3 and not engine.lives._of_sequence
