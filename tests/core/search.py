"""Every order of events of a small instance, by breadth-first search over canonical states: `make prove`.

After each event every invariant is checked (`invariants.check`, and `World`'s and `Model`'s: requests and blocks of
every tier are conserved, nobody outranks whom it yields to, every block holds what its name and its table say), and
from each state, if nothing arrives and steps and transfers go on to end well, all must finish (`liveness`). The
shortest path to a violation is printed, to be pasted as `replay(instance, steps)` in a test.
"""

import argparse
import gc
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pagedjax.core import phases, tenants
from pagedjax.core.errors import SchedulerError
from pagedjax.core.invariants import check
from pagedjax.core.phases import TRANSITIONS
from tests.core.canonical import digest
from tests.core.instances import INSTANCES
from tests.core.model import Instance, Model, Step

BROKEN = (AssertionError, SchedulerError, KeyError, IndexError, StopIteration, ValueError, TypeError)
NOT_YET = 0xFFFFFFFF


class Violation(Exception):
    """`steps` lead from the empty state to what must not be."""

    def __init__(self, instance: Instance, steps: list[Step], what: str) -> None:
        super().__init__(f"{what}\nreplay(INSTANCES[{instance.name!r}], {steps!r})")
        self.steps = steps


@dataclass(slots=True)
class Found:
    """What a search has seen. For each state, in order of discovery: the one it was first reached from and by which
    step, where its completion goes on (see `completion_step`) and whether that is by a plan, and the plans within which
    it must end."""

    instance: Instance
    places: dict[bytes, int] = field(default_factory=dict)
    parents: array = field(default_factory=lambda: array("I"))
    steps: list[Step] = field(default_factory=list)
    completions: array = field(default_factory=lambda: array("I"))
    plans: bytearray = field(default_factory=bytearray)
    bounds: array = field(default_factory=lambda: array("H"))
    transitions: set[Any] = field(default_factory=set)
    num_edges: int = 0
    depth: int = 0
    is_complete: bool = False
    longest_completion: int = 0
    seconds: float = 0.0
    frontier: deque = field(default_factory=deque)  # states that were not looked into, if it is not complete

    def path(self, place: int) -> list[Step]:
        steps = []
        while place:
            steps.append(self.steps[place])
            place = self.parents[place]
        return steps[::-1]

    def report(self) -> str:
        whole = "all states" if self.is_complete else "not all states"
        missing = sorted(f"{phase}/{cause}" for phase, cause in set(TRANSITIONS) - self.transitions)
        return (
            f"{self.instance.name}: {len(self.places)} {whole}, {self.num_edges} edges, depth {self.depth}, "
            f"{len(self.transitions)} of {len(TRANSITIONS)} transitions, every completion within "
            f"{self.longest_completion} plans, {self.seconds:.0f} s; "
            f"not taken: {', '.join(missing) or 'none'}"
        )


def search(instance: Instance, max_states: int = sys.maxsize, max_seconds: float = 1e9) -> Found:
    """All states that can be reached, or the first `max_states`. Raises Violation."""
    found, start = Found(instance), time.monotonic()
    with observed(found.transitions, instance):
        model = Model(instance)
        _enter(found, digest(model), model, 0, ())
        while found.frontier and len(found.places) < max_states and time.monotonic() - start < max_seconds:
            place, depth, model = found.frontier.popleft()
            _expand(found, place, depth, model)
        found.is_complete = not found.frontier
        liveness(found)
    found.seconds = time.monotonic() - start
    return found


@contextmanager
def observed(transitions: set[Any], instance: Instance) -> Iterator[None]:
    """Note which edges of TRANSITIONS are taken, and judge shares by as few tokens as the instance says."""
    table, min_sample = phases.TRANSITIONS, tenants.MIN_SAMPLE
    phases.TRANSITIONS, tenants.MIN_SAMPLE = _Observed(table, transitions), instance.min_sample
    gc.disable()  # states hold no cycles, and looking through a hundred thousand of them takes most of the time
    try:
        yield
    finally:
        gc.enable()
        phases.TRANSITIONS, tenants.MIN_SAMPLE = table, min_sample


class _Observed(dict):
    def __init__(self, table: dict[Any, Any], taken: set[Any]) -> None:
        super().__init__(table)
        self._taken = taken

    def get(self, edge: Any, default: Any = None) -> Any:
        if edge in self:
            self._taken.add(edge)
        return super().get(edge, default)


def _enter(found: Found, key: bytes, model: Model, parent: int, step: Step, depth: int = 0) -> int:
    place = found.places[key] = len(found.parents)
    found.parents.append(parent)
    found.steps.append(step)
    found.completions.append(NOT_YET)
    found.plans.append(0)
    found.bounds.append(model.step_bound())
    found.frontier.append((place, depth, model))
    found.depth = max(found.depth, depth)
    return place


def _expand(found: Found, place: int, depth: int, model: Model) -> None:
    """Look at every state that one event leads to. The completion goes to the first that is another one."""
    for step in model.steps():
        following = model.clone()
        found.num_edges += 1
        try:
            following.take(step)
            if step == ("due",) and following.state == model.state._replace(now_us=following.state.now_us):
                continue  # nothing to plan
            key = digest(following)
            target = found.places.get(key)
            if target is None:
                check(following.state)
        except BROKEN as error:
            what = f"{type(error).__name__}: {error}"
            raise Violation(found.instance, [*found.path(place), step], what) from error
        if target is None:
            following.share_with(model)
            target = _enter(found, key, following, place, step, depth + 1)
        if found.completions[place] == NOT_YET and target != place and completes(step):
            found.completions[place] = target
            found.plans[place] = following.state.next_plan_id > model.state.next_plan_id
    if found.completions[place] == NOT_YET:
        _check_end(found, place, model)
        found.completions[place] = place


def completes(step: Step) -> bool:
    """The events of a completion, by which everything that is here must finish: a step is due, or else the oldest one
    is done and nobody stops, or else the oldest transfer is done."""
    return step in (("due",), ("done", ()), ("transfer", 0, True))


def _check_end(found: Found, place: int, model: Model) -> None:
    state = model.state
    pools = (state.pool, state.tiers.host, state.tiers.disk)
    ends_well = model.is_idle() and not model.staged and all(pool.num_free == pool.num_blocks for pool in pools)
    if not ends_well or state.pending or state.suspects or state.tiers.parked or state.shared_tails:
        raise Violation(found.instance, found.path(place), "stuck, or something is left when nobody is here any more")


def liveness(found: Found) -> None:
    """From every state, if nothing arrives, no row stops early, and steps and transfers end well, all finish within
    3 * sum(prompt_len + max_tokens) plans, over those who are here (`World.step_bound`).

    Each state has one completion step, so completions are a graph in which every path must end: it has no cycle, and
    its longest path from a state has no more plans than the bound. States that were not looked into, where the search
    was not complete, are completed one by one, a sample of them.
    """
    lengths = array("i", [-1]) * len(found.parents)
    unknown = {place: model for place, _, model in found.frontier}
    sampled = sorted(unknown)[:: max(1, len(unknown) // 300)]
    for place in sampled:
        lengths[place] = _complete(found, place, unknown[place].clone())
    for first in range(len(lengths)):
        path, place, on_path = [], first, set()
        while lengths[place] < 0 and found.completions[place] not in (NOT_YET, place):
            if place in on_path:
                raise Violation(found.instance, found.path(first), "it goes round in circles for ever")
            on_path.add(place)
            path.append(place)
            place = found.completions[place]
        length = max(0, lengths[place])
        lengths[place] = length
        for place in reversed(path):
            length += found.plans[place]
            lengths[place] = length
            if length > found.bounds[place]:
                raise Violation(found.instance, found.path(place), f"{length} plans, not {found.bounds[place]}")
    found.longest_completion = max(lengths)


def _complete(found: Found, place: int, model: Model) -> int:
    try:
        num_plans, bound = model.run(), found.bounds[place]
        assert num_plans <= bound, f"{num_plans} plans, not {bound}"
    except BROKEN as error:
        raise Violation(found.instance, found.path(place), f"its completion: {error}") from error
    return num_plans


def replay(instance: Instance, steps: list[Step]) -> Model:
    """The model after these steps, each of which is checked."""
    with observed(set(), instance):
        model = Model(instance)
        for step in steps:
            model.take(step)
            check(model.state)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-states", type=int, default=1_000_000, help="of each instance (default a million)")
    parser.add_argument("--max-seconds", type=float, default=1e9, help="for each instance (default: no limit)")
    parser.add_argument("instances", nargs="*", default=list(INSTANCES), help=f"of {', '.join(INSTANCES)}")
    args = parser.parse_args()
    for name in args.instances:
        try:
            print(search(INSTANCES[name], args.max_states, args.max_seconds).report(), flush=True)
        except Violation as violation:
            sys.exit(f"{name}: {violation}")


if __name__ == "__main__":
    main()
