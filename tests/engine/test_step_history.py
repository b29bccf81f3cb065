"""The latest steps, one by one: none is left out, and the oldest are forgotten."""

from pagedjax.engine import step_history
from tests.engine.fakes import CRASH, make_engine
from tests.engine.test_engine import params, run
from tests.engine.test_swapping import run_all


def test_every_step_is_there_with_its_rows_and_tokens():
    engine = make_engine()
    run(engine, list(range(20)), params(max_tokens=4))
    steps = engine.steps.since(-1, limit=100)
    assert [step.number for step in steps] == list(range(len(steps)))
    sizes = [(step.num_rows, step.num_decodes, step.num_tokens) for step in steps]
    assert sizes[:3] == [(1, 0, 16), (1, 0, 4), (1, 1, 1)]
    assert all(step.planned_us <= step.done_us and step.num_running == 1 for step in steps)


def test_only_what_is_new_and_not_more_than_wanted_is_given():
    engine = make_engine()
    run(engine, [1, 2, 3], params(max_tokens=12))
    steps = engine.steps.since(-1, limit=100)
    assert engine.steps.since(steps[4].number, limit=100) == steps[5:]
    assert engine.steps.since(-1, limit=3) == steps[-3:]
    assert engine.steps.since(steps[-1].number, limit=3) == []


def test_a_step_that_fails_is_marked():
    engine = make_engine()
    run_all(engine, [[CRASH, 1, 2], [1, 2, 3]], params(max_tokens=6))
    failed = [step for step in engine.steps.since(-1, limit=100) if step.failed]
    assert failed and not engine.steps._in_flight


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(step_history, "MAX_STEPS", 10)
    engine = make_engine()
    run(engine, [1, 2, 3], params(max_tokens=40))
    steps = engine.steps.since(-1, limit=100)
    assert len(steps) == 10 and steps[-1].number == steps[0].number + 9 > 30
