"""All orders of events of small instances, to the last state; and whether that search can be believed."""

from collections import deque
from functools import cache

import pytest

from pagedjax.core import parking, planning
from pagedjax.core.phases import TRANSITIONS
from tests.core import canonical
from tests.core.abstraction import check_abstraction
from tests.core.instances import INSTANCES, SMALL
from tests.core.model import Model
from tests.core.mutants import gather_nothing, planted
from tests.core.search import BROKEN, Violation, replay, search

NAMES = [instance.name for instance in SMALL]


@cache
def searched(name):
    return search(INSTANCES[name])


@pytest.mark.parametrize("name", NAMES)
def test_no_order_of_events_breaks_a_small_instance_and_all_finish_from_every_state(name):
    found = searched(name)
    assert found.is_complete
    assert len(found.places) > 50
    assert 0 < found.longest_completion <= max(found.bounds)


def test_the_small_instances_take_every_transition():
    assert set().union(*(searched(name).transitions for name in NAMES)) == set(TRANSITIONS)


def test_a_search_gives_the_same_states_each_time():
    found = search(INSTANCES["late"])
    assert list(found.places) == list(searched("late").places)


def test_every_path_of_a_search_can_be_replayed():
    found = searched("age")
    for key, place in list(found.places.items())[::50]:
        assert canonical.digest(replay(INSTANCES["age"], found.path(place))) == key


def test_a_violation_tells_a_shortest_path_that_breaks_the_scheduler_again():
    with planted(parking, "_swap_out", gather_nothing):
        with pytest.raises(Violation, match=r"replay\(INSTANCES\['way'\], \[") as violation:
            search(INSTANCES["way"])
        steps = violation.value.steps
        replay(INSTANCES["way"], steps[:-1])
        with pytest.raises(BROKEN):
            replay(INSTANCES["way"], steps)


def test_a_scheduler_that_plans_nothing_is_stuck():
    idle = planted(planning, "admit", lambda admit: lambda state, batch: state)
    with idle, pytest.raises(Violation, match="stuck"):
        search(INSTANCES["late"])


def test_states_that_the_search_takes_for_one_go_on_alike():
    num_compared, num_events = check_abstraction(2_000)
    assert num_compared >= 2_000
    assert num_events > 5 * num_compared


@pytest.mark.parametrize(
    ("name", "coarser", "instance"),
    [
        ("_tenants", lambda tenants: lambda model: (), "owed"),
        ("_pool", lambda pool: lambda *args: (), "slot"),
        ("_times", lambda times: lambda naming, s: (), "way"),
        ("_num_to_book", lambda num: lambda model: 0, "turns"),
    ],
    ids=["no counters", "no blocks", "no times", "no distances between counters"],
)
def test_an_abstraction_that_forgets_too_much_is_found_out(name, coarser, instance):
    with planted(canonical, name, coarser), pytest.raises((AssertionError, *BROKEN)):
        check_abstraction(3_000, [instance])


def test_a_clone_of_a_model_is_independent_of_it():
    model = Model(INSTANCES["failure"])
    model.take(("arrive", 0))
    model.take(("due",))
    key, copy = canonical.digest(model), model.clone()
    frontier = deque([copy])
    for _ in range(5):
        following = frontier.popleft()
        following.take(next(iter(following.steps())) if following.state.in_flight == () else ("done", ()))
        frontier.append(following)
    assert canonical.digest(model) == key
    assert canonical.digest(copy) != key
