"""Bugs planted in the scheduler on purpose: the checks of the random worlds must catch every one of them, and the
search of all orders of events those that show in nothing else.

The right scheduler passes the same worlds in `test_random_runs`, and the same searches in `test_search`.
"""

import pytest

from pagedjax.core.errors import SchedulerError
from tests.core.instances import INSTANCES
from tests.core.mutants import MUTANTS, MUTANTS_FOR_SEARCH, planted, run_worlds
from tests.core.search import Violation, search


@pytest.mark.parametrize(("module", "name", "mutate"), MUTANTS, ids=[mutate.__name__ for _, _, mutate in MUTANTS])
def test_a_planted_bug_is_caught(module, name, mutate):
    with planted(module, name, mutate), pytest.raises((AssertionError, SchedulerError, KeyError)):
        run_worlds()


@pytest.mark.parametrize(
    ("module", "name", "mutate", "instance"),
    MUTANTS_FOR_SEARCH,
    ids=[mutant[2].__name__ for mutant in MUTANTS_FOR_SEARCH],
)
def test_a_planted_bug_that_only_a_search_can_see_is_caught(module, name, mutate, instance):
    with planted(module, name, mutate), pytest.raises(Violation):
        search(INSTANCES[instance])
