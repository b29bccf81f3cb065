"""Long random runs in worlds that are short of everything."""

import pytest

from pagedjax.core.state import Preempt, RunStep
from tests.core.world import random_world

NUM_WORLDS = 100


def test_random_worlds_keep_every_invariant_and_finish_within_the_bound():
    num_events, num_preempted, num_shared = 0, 0, 0
    for seed in range(NUM_WORLDS):
        world = random_world(seed)
        num_events += len(world.log)
        num_preempted += len(world.preempted)
        num_shared += sum(row.start > 0 for row in first_rows(world))
    assert num_events > 20_000
    assert num_preempted > 100  # else the worlds are too roomy to mean something
    assert num_shared > 100


@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 1}, {"num_blocks": 3, "block_size": 8}, {"block_size": 1}], ids=str
)
def test_narrow_worlds_do_not_get_stuck(limits):
    for seed in range(20):
        random_world(1000 + seed, num_events=150, **limits)


def test_a_lone_slot_that_changing_ranks_fight_over_is_left_in_the_end():
    # Twenty-three preemptions for 27 tokens: one plan more than if ranks had stayed as they were.
    random_world(500669)


def first_rows(world):
    """The first row of every sequence."""
    seen = {}
    for effect in world.effects(RunStep):
        for row in effect.plan.rows:
            seen.setdefault(row.sequence_id, row)
    return seen.values()


def test_tenants_that_are_owed_are_protected_in_random_worlds_too(monkeypatch):
    """A share is judged by so few tokens here that protection comes and goes all the time."""
    monkeypatch.setattr("pagedjax.core.tenants.MIN_SAMPLE", 10)
    reasons = set()
    for seed in range(40):
        world = random_world(3000 + seed, num_events=200, tenant_weights={"gold": 3, "silver": 1})
        reasons |= {effect.reason for effect in world.effects(Preempt)}
    assert {"fairness", "ageing", "priority", "memory", "slots"} <= reasons
