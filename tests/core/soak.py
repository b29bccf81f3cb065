"""Random worlds until a million events have been checked, each by every invariant: `make soak`."""

import argparse

from tests.core.world import random_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="events to check (default a million)")
    parser.add_argument("--seed", type=int, default=0, help="the first world's seed (default 0)")
    args = parser.parse_args()
    num_events, num_preempted, seed = 0, 0, args.seed
    while num_events < args.events:
        world = random_world(seed, num_events=600)
        num_events += len(world.log)
        num_preempted += len(world.preempted)
        seed += 1
    print(
        f"{num_events} events in {seed - args.seed} worlds, {num_preempted} preemptions: nothing lost, nothing leaked"
    )


if __name__ == "__main__":
    main()
