"""Is the abstraction of the search right? Two states that are one in it must go on alike, whatever happens next.

Random walks look for pairs of unequal states with equal digests; then the same random events happen to both, and each
time the effects, in the words of the abstraction, and the digests after them must be equal.
"""

import random
from collections.abc import Iterator, Sequence

from tests.core.canonical import canonical, digest, renamed_effects
from tests.core.instances import INSTANCES
from tests.core.model import Instance, Model
from tests.core.naming import Naming
from tests.core.search import observed

WALK_LEN, CONTINUATION_LEN, NUM_KEPT = 40, 6, 5_000


def check_abstraction(num_continuations: int, names: Sequence[str] = tuple(INSTANCES)) -> tuple[int, int]:
    """Raise AssertionError if two states that are one go on differently. Gives the numbers of continuations and events
    that were compared."""
    rng, num_compared, num_events = random.Random(0), 0, 0
    share = -(-num_continuations // len(names))
    for name in names:
        instance = INSTANCES[name]
        with observed(set(), instance):
            for _, (one, other) in zip(range(share), pairs(instance, rng)):
                num_compared += 1
                num_events += go_on_alike(one, other, rng)
    return num_compared, num_events


def pairs(instance: Instance, rng: random.Random) -> Iterator[tuple[Model, Model]]:
    """Unequal states with equal digests, for ever."""
    known: dict[bytes, Model] = {}
    while True:
        model = Model(instance)
        for _ in range(WALK_LEN):
            model.take(rng.choice(list(model.steps())))
            key = digest(model)
            first = known.get(key)
            if first is not None and first.state != model.state:
                yield first, model
                if rng.random() < 0.5:
                    known[key] = model.clone()
            elif first is None and len(known) < NUM_KEPT:
                known[key] = model.clone()


def go_on_alike(one: Model, other: Model, rng: random.Random) -> int:
    one, other = one.clone(), other.clone()
    for num_events in range(CONTINUATION_LEN):
        steps = list(one.steps())
        assert steps == list(other.steps()), "other events may come next"
        if not steps:
            return num_events
        step = rng.choice(steps)
        assert _effects(one, step) == _effects(other, step), f"{step} has other effects"
        assert digest(one) == digest(other), f"{step} leads to another state"
    return CONTINUATION_LEN


def _effects(model: Model, step: tuple) -> list:
    naming = Naming(model)
    canonical(naming)
    model.take(step)
    return [renamed_effects(naming, effects) for _, effects in model.log]


def main() -> None:
    num_compared, num_events = check_abstraction(100_000)
    print(f"{num_compared} pairs of states that are one go on alike, for {num_events} events")


if __name__ == "__main__":
    main()
