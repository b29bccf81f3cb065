"""Events that cannot follow the state are our own bugs: they raise, and the old state stands."""

import pytest

from pagedjax.core.errors import SchedulerError
from pagedjax.core.events import Aborted, Arrived, StepDone, StepDue
from pagedjax.core.plan import RowResult
from pagedjax.core.request import Request
from pagedjax.core.scheduler import update
from tests.core.test_values import frozen
from tests.core.world import World

NAME = b"x" * 32


def busy():
    """Sequence 0 decodes, 1 has half of its prompt in the cache, 2 waits; a step is in flight, the time is 5."""
    world = World(max_num_seqs=2, max_num_batched_tokens=8, async_scheduling=True)
    for prompt_len in (3, 16, 5):
        world.arrive(prompt_len, max_tokens=2)
    world.due()
    world.done()
    world.due()
    return world


def test_the_state_that_the_errors_start_from():
    world = busy()
    (plan,) = world.state.in_flight
    assert [(row.sequence_id, row.start, row.length, row.samples) for row in plan.rows] == [
        (0, 3, 1, True),
        (1, 5, 7, False),
    ]
    assert (world.now_us, plan.plan_id, world.waiting()) == (6, 1, [2])


def done(*results, plan_id=1):
    return StepDone(plan_id, results, 9)


GOOD = (RowResult(0, 1, "length"), RowResult(1, 0))

IMPOSSIBLE = [
    ("time runs backwards", StepDue(5)),
    ("2 is here already", Arrived(Request(2, 5, 2), (), 9)),
    ("1 is here already", Arrived(Request(1, 5, 2), (), 9)),
    ("has nothing to compute", Arrived(Request(9, 0, 2), (), 9)),
    ("has nothing to compute", Arrived(Request(9, 5, 0), (), 9)),
    ("has 2 block names", Arrived(Request(9, 5, 2), (NAME, NAME), 9)),
    ("has 1 block names", Arrived(Request(9, 9, 2), (NAME,), 9)),
    ("plan 2 is not the oldest", done(*GOOD, plan_id=2)),
    ("plan 0 is not the oldest", done(*GOOD, plan_id=0)),
    ("do not match its rows", done(GOOD[0])),
    ("do not match its rows", done(*reversed(GOOD))),
    ("cannot accept 0 tokens", done(RowResult(0, 0), GOOD[1])),
    ("cannot accept 1 tokens", done(GOOD[0], RowResult(1, 1))),
    ("cannot accept 2 tokens", done(RowResult(0, 2, "length"), GOOD[1])),
    ("cannot accept 2 tokens", done(GOOD[0], RowResult(1, 2))),
    ("cannot accept -1 tokens", done(RowResult(0, -1, "stop"), GOOD[1])),
    ("has all its tokens and is not finished", done(RowResult(0, 1), GOOD[1])),
    ("ends for no known reason: boredom", done(RowResult(0, 1, "boredom"), GOOD[1])),
    ("has 1 full blocks and 2 names", done(RowResult(0, 1, "length", (NAME,)), GOOD[1])),
    ("has 4 full blocks and 5 names", done(GOOD[0], RowResult(1, 0, "stop", (NAME,)))),
]


@pytest.mark.parametrize(("complaint", "event"), IMPOSSIBLE, ids=[complaint for complaint, _ in IMPOSSIBLE])
def test_an_impossible_event_raises_and_the_old_state_stands(complaint, event):
    world = busy()
    before = frozen(world.state)
    with pytest.raises(SchedulerError, match=complaint):
        update(world.state, event)
    assert frozen(world.state) == before
    world.run()
    assert sorted(world.finished) == [0, 1, 2]


def test_the_results_that_the_impossible_ones_vary_are_possible():
    world = busy()
    state, effects = update(world.state, done(*GOOD))
    assert [effect.sequence_id for effect in effects] == [0]
    assert state.in_flight == ()


def test_a_step_done_with_nothing_in_flight_raises():
    with pytest.raises(SchedulerError, match="not the oldest"):
        update(World().state, StepDone(0, (), 0))


def test_an_abort_of_a_sequence_that_is_not_there_is_no_error():
    world = busy()
    state, effects = update(world.state, Aborted(77, 9))
    assert effects == ()
    assert state.running == world.state.running


def test_a_sequence_id_may_come_again_once_it_has_finished():
    world = World()
    world.arrive(5, max_tokens=1)
    world.run()
    state, effects = update(world.state, Arrived(Request(0, 5, 1), (), 99))
    assert (len(state.waiting), effects) == (1, ())
