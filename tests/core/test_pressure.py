"""Throughput when memory is short, in service tokens a step: what the modes keep of it, and how soon it is back."""

import pytest

from pagedjax.core.config import SchedulerConfig
from tests.core.flood import Flood, Source


def any_lengths(rng):
    """Eight blocks in the mean at the end, so sixteen sequences need 128."""
    return rng.randint(32, 96), rng.randint(32, 96)


def flood_in(num_blocks, preemption_mode="aggressive"):
    config = SchedulerConfig(
        num_blocks=num_blocks, max_num_seqs=16, max_num_batched_tokens=256, preemption_mode=preemption_mode
    )
    flood = Flood(config, Source("a", any_lengths))
    rate(flood, 200)
    return flood


def rate(flood, num_steps):
    before = flood.service.total()
    for _ in range(num_steps):
        flood.step()
    return (flood.service.total() - before) / num_steps


@pytest.fixture(scope="module")
def ample():
    return rate(flood_in(1000), 600)


@pytest.mark.parametrize(("mode", "least"), [("aggressive", 0.7), ("conservative", 0.5)])
def test_with_two_thirds_of_the_memory_that_is_needed_most_of_the_throughput_is_left(ample, mode, least):
    flood = flood_in(85, mode)
    assert rate(flood, 600) >= least * ample
    assert bool(flood.preemptions) is (mode == "aggressive")


@pytest.mark.parametrize("mode", ["aggressive", "conservative"])
def test_throughput_is_back_within_sixty_steps_when_the_pressure_ends(mode):
    flood = flood_in(120, mode)
    before = rate(flood, 300)
    hogs = [flood.arrive("a", 100, 300, priority=-1) for _ in range(12)]
    while not all(hog in flood.finished for hog in hogs):
        flood.step()
    assert flood.preemptions
    assert rate(flood, 60) >= 0.8 * before
