"""States are values: they never change, and they compare, hash, travel and replay."""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import get_args

import pytest

from pagedjax.core.effects import Effect
from pagedjax.core.scheduler import init, update
from tests.core.instances import INSTANCES
from tests.core.search import search
from tests.core.world import World, random_world

ROOT = Path(__file__).parents[2]


SEEDS = (0, 14)  # with them, every kind of effect
SWAPS = {"num_host_blocks": 4, "num_disk_blocks": 6, "preemption_method": "swap"}


def test_the_worlds_that_are_compared_ask_for_every_kind_of_effect():
    kinds = {type(effect) for seed in SEEDS for _, effects in swapping_world(seed).log for effect in effects}
    assert kinds == set(get_args(Effect))


def swapping_world(seed):
    return random_world(seed, num_events=150, **SWAPS)


def frozen(value):
    """A copy of everything in a state, in types that have nothing to do with it."""
    if isinstance(value, Mapping):
        return sorted((frozen(key), frozen(item)) for key, item in value.items())
    if isinstance(value, tuple):
        return [frozen(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return [frozen(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


@pytest.mark.parametrize("seed", SEEDS)
def test_no_event_changes_an_old_state(seed):
    world = swapping_world(seed)
    state, history = init(world.config), []
    for event, _ in world.log:
        history.append((state, frozen(state)))
        state, _ = update(state, event)
    assert all(frozen(old) == copy for old, copy in history)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_event_on_an_old_state_gives_the_same_again(seed):
    world = swapping_world(seed)
    state, history = init(world.config), []
    for event, effects in world.log:
        history.append((state, event, effects))
        state, _ = update(state, event)
    for old, event, effects in reversed(history):
        assert update(old, event)[1] == effects


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_pickled_state_goes_on_like_the_original(async_scheduling, seed):
    world = random_world(seed, num_events=100, **SWAPS | {"async_scheduling": async_scheduling})
    state = init(world.config)
    for event, effects in world.log:
        copy = pickle.loads(pickle.dumps(state))
        assert copy == state
        assert update(copy, event)[1] == effects
        state, _ = update(state, event)


def test_equal_histories_give_equal_states_with_equal_hashes():
    one, other = (random_world(11, num_events=100).state for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != World().state


DIGEST = "from tests.core.test_values import digest; print(digest())"


def digest() -> str:
    """All effects of a few random worlds, and all states of a search, in 64 characters."""
    effects = [effects for seed in SEEDS for _, effects in swapping_world(seed).log]
    effects += [list(search(INSTANCES["fork"], max_states=300).places)]
    return sha256(repr(effects).encode()).hexdigest()


@pytest.mark.parametrize("hash_seed", ["0", "1", "4294967295"])
def test_effects_are_the_same_in_every_process_whatever_its_hash_seed(hash_seed):
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", DIGEST]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    assert done.stdout.strip() == digest()


@pytest.mark.parametrize("num_blocks", [7, 64])
@pytest.mark.parametrize("limits", [{"enable_prefix_caching": False}, {"max_num_batched_tokens": 8}, {}], ids=str)
def test_every_way_of_scheduling_gives_each_sequence_the_same_tokens(limits, num_blocks):
    worlds = [World(max_num_seqs=1, stop_every=11)]
    worlds += [World(num_blocks=num_blocks, stop_every=11, async_scheduling=ahead, **limits) for ahead in (False, True)]
    for world in worlds:
        for i in range(12):
            world.arrive([1, 2, 3, 4, 5, 6, 7, 8, *range(i)][i % 5 :], max_tokens=5 + i % 8, priority=i % 3)
        world.run()
    assert worlds[0].tokens == worlds[1].tokens == worlds[2].tokens
    assert worlds[0].finished == worlds[1].finished == worlds[2].finished
    assert num_blocks == 64 or all(world.preempted for world in worlds[1:])
