"""Nobody is preempted twice within a chunk: who comes back finds room for it, and for what others take meanwhile."""

import random

import pytest

from pagedjax.core.effects import Preempt, RunStep
from tests.core.world import World

CHUNK = 8


def crowd(seed, chunk=CHUNK, **limits):
    """Many sequences on a pool that holds a third of them, all of one rank but for their arrival."""
    world, rng = World(num_blocks=24, max_num_seqs=12, min_execution_chunk=chunk, **limits), random.Random(seed)
    for _ in range(16):
        world.arrive(rng.randint(1, 14), max_tokens=rng.randint(10, 40))
    return world


def stays(world):
    """Tokens that were computed between one preemption of a sequence and its next."""
    computed: dict[int, int] = {}
    found = []
    for _, effects in world.log:
        for effect in effects:
            if isinstance(effect, RunStep):
                for row in effect.plan.rows:
                    if row.sequence_id in computed:
                        computed[row.sequence_id] += row.length
            elif isinstance(effect, Preempt):
                if effect.sequence_id in computed:
                    found.append(computed[effect.sequence_id])
                computed[effect.sequence_id] = 0
    return found


@pytest.mark.parametrize(
    "limits", [{}, {"num_host_blocks": 40, "preemption_method": "swap"}], ids=["parked", "swapped"]
)
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_who_comes_back_computes_a_chunk_before_it_is_preempted_again(seed, async_scheduling, limits):
    world = crowd(seed, async_scheduling=async_scheduling, **limits)
    world.run()
    assert world.effects(Preempt)
    assert min(stays(world), default=CHUNK) >= CHUNK


def test_without_a_chunk_to_compute_somebody_is_preempted_again_at_once():
    """So the tests above can fail."""
    found = [stay for seed in range(8) for stay in stays(_run(crowd(seed, chunk=0)))]
    assert min(found) < CHUNK


def _run(world):
    world.run()
    return world


def test_one_that_runs_alone_comes_back_though_the_pool_holds_no_chunk_beside_it():
    world = World(num_blocks=4, min_execution_chunk=64)
    first = world.arrive(5, max_tokens=10)
    while world.sequence(first) is None or len(world.output(first)) < 2:
        world.step()
    world.arrive(2, max_tokens=3, priority=-1)
    world.run()
    assert world.finished[first] == "length"
