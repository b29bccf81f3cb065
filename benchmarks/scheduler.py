"""What the scheduler costs in Python: microseconds of `update` at the size of a busy server.

    python benchmarks/scheduler.py --out benchmarks/results/scheduler.json

The limits: a decode step (StepDue and StepDone together) within 1 ms at 256 running, 10,000 waiting and 100,000 blocks;
arrival and finish within 50 us + 1.5 us a block; planning a prefill within 1 ms + 2 us a new block; all of it flat in
the number waiting. Context lengths are staggered, so that every step takes and names blocks for some of its rows. With
*tenants*, running and waiting requests belong to that many in turn. Times are CPU times of the thread over single
calls: best, median and 99th percentile. The garbage collector runs as in a server that has started: what the set-up
made is frozen, and collections are rare (`pagedjax.engine.build.spare_collections`). A *warm* pool has no clean block:
all that is free is idle and cached, so every block taken is an eviction.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pagedjax.bench.machine import origin
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.events import Aborted, Arrived, Event, StepDone, StepDue
from pagedjax.core.plan import RowResult
from pagedjax.core.request import Request
from pagedjax.core.scheduler import init, update
from pagedjax.core.state import Sequence, State
from pagedjax.engine.build import spare_collections

BLOCK_SIZE = 16
NUM_RUNNING = 256
NUM_WAITING = 10_000
NUM_BLOCKS = 100_000
NUM_SHORT_BLOCKS = 16_500  # of which the running sequences need nearly all at the start
NUM_REPEATS = 100
MAX_REPEATS_US = 1_000_000

Figure = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="decode steps to time (default 400)")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    figures = []
    for figure in chain(decode_steps(args.steps), short_steps(args.steps), arrivals(), finishes(), prefills()):
        figures.append(figure)
        print(line(figure), flush=True)
    if args.out:
        report = {
            **origin(__file__),
            "unit": "us",
            "figures": figures,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def decode_steps(num_steps: int) -> Iterator[Figure]:
    """Planning a step of 256 decodes and finishing the one before it: one more is in flight all the time."""
    cases = [(0, False, 1), (NUM_WAITING, False, 1), (100_000, False, 1), (NUM_WAITING, True, 1)]
    for num_waiting, warm, num_tenants in [*cases, (NUM_WAITING, False, 8)]:
        state = with_waiting(busy(NUM_RUNNING, warm=warm, num_tenants=num_tenants), num_waiting, num_tenants)
        due, done, _ = stepped_on(state, num_steps)
        setting = {"num_waiting": num_waiting, "warm": warm, "tenants": num_tenants}
        yield figure_of("decode step", [a + b for a, b in zip(due, done)], 1000, setting)
        yield figure_of("decode step, StepDue", due, None, setting)
        yield figure_of("decode step, StepDone", done, None, setting)


def short_steps(num_steps: int) -> Iterator[Figure]:
    """The same where the pool is full: in most steps rows wait for blocks, and now and then somebody must yield."""
    for num_tenants in (1, 8):
        state = busy(NUM_RUNNING, num_tenants=num_tenants, num_blocks=NUM_SHORT_BLOCKS)
        due, done, state = stepped_on(with_waiting(state, NUM_WAITING, num_tenants), num_steps)
        setting = {"tenants": num_tenants, "running_at_last": len(state.running)}
        yield figure_of("decode step, memory short", [a + b for a, b in zip(due, done)], 1000, setting)


def stepped_on(state: State, num_steps: int) -> tuple[list[float], list[float], State]:
    """Times of planning each step, and of finishing the one before it."""
    state, _ = update(state, StepDue(0))
    spare_collections()
    due, done = [], []
    for _ in range(num_steps):
        due_us, state = timed(state, StepDue(0))
        done_us, state = timed(state, step_done(state))
        due.append(due_us)
        done.append(done_us)
    return due, done, state


def arrivals() -> Iterator[Figure]:
    for num_waiting in (0, NUM_WAITING, 100_000):
        state = with_waiting(busy(NUM_RUNNING), num_waiting)
        for num_blocks in (1, 128, 1024):
            event = arrival(-1, num_blocks)
            setting = {"num_waiting": num_waiting, "blocks": num_blocks}
            yield figure_of("arrival", repeated(state, event), 50 + 1.5 * num_blocks, setting)


def finishes() -> Iterator[Figure]:
    """One of 256 running sequences leaves and frees its blocks, at once since nothing is in flight."""
    for num_blocks in (1, 128, 1024):
        state, _ = update(busy(NUM_RUNNING - 1), arrival(-1, num_blocks))
        state = stepped(with_waiting(state, NUM_WAITING))
        yield figure_of("finish", repeated(state, Aborted(-1, 0)), 50 + 1.5 * num_blocks, {"blocks": num_blocks})


def prefills() -> Iterator[Figure]:
    """Admitting one prompt beside 255 decodes, and the end of that step, which enters its blocks into the cache."""
    for num_blocks in (1, 128, 1024, 32_768):
        for warm in (False, True):
            state, _ = update(busy(NUM_RUNNING - 1, warm=warm), arrival(-1, num_blocks))
            state = with_waiting(state, NUM_WAITING)
            setting = {"new_blocks": num_blocks, "warm": warm}
            yield figure_of("prefill, StepDue", repeated(state, StepDue(0)), 1000 + 2 * num_blocks, setting)
            state, _ = update(state, StepDue(0))
            yield figure_of("prefill, StepDone", repeated(state, step_done(state)), None, setting)
    for num_blocks in (128, 1024, 32_768):
        state = busy(NUM_RUNNING - 1, warm=True)
        state, _ = update(state, Arrived(Request(-1, num_blocks * BLOCK_SIZE + 1, 100, -1), WARM_NAMES[:num_blocks], 0))
        state = with_waiting(state, NUM_WAITING)
        yield figure_of("prefix hit, StepDue", repeated(state, StepDue(0)), None, {"cached_blocks": num_blocks})


def busy(num_running: int, *, warm: bool = False, num_tenants: int = 1, num_blocks: int = NUM_BLOCKS) -> State:
    """A state with that many sequences decoding at staggered lengths, and nothing in flight."""
    state = init(
        SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=NUM_RUNNING,
            max_num_batched_tokens=NUM_BLOCKS * BLOCK_SIZE,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
            max_queued_requests=10**6,
            max_queued_tokens=10**9,
        )
    )
    if warm:
        num_tokens = (NUM_BLOCKS - 1) * BLOCK_SIZE
        state = stepped(update(state, Arrived(Request(0, num_tokens, 1), WARM_NAMES[: NUM_BLOCKS - 1], 0))[0])
        state, _ = update(state, Aborted(0, 0))
    lengths = random.Random(0)
    for sequence_id in range(num_running):
        prompt_len = lengths.randint(1, 2000)
        names = tuple(name(sequence_id, i) for i in range(prompt_len // BLOCK_SIZE))
        request = Request(sequence_id, prompt_len, 4000, tenant=f"tenant {sequence_id % num_tenants}")
        state, _ = update(state, Arrived(request, names, 0))
    return stepped(state)


def with_waiting(state: State, num_waiting: int, num_tenants: int = 1) -> State:
    for sequence_id in range(NUM_RUNNING, NUM_RUNNING + num_waiting):
        request = Request(sequence_id, BLOCK_SIZE, 100, tenant=f"tenant {sequence_id % num_tenants}")
        state, _ = update(state, Arrived(request, (name(sequence_id, 0),), 0))
    return state


def stepped(state: State) -> State:
    state, _ = update(state, StepDue(0))
    return update(state, step_done(state))[0]


def step_done(state: State) -> StepDone:
    """The event that the oldest plan in flight ended, each row with a token and the name of the block it filled."""
    plan = state.in_flight[0]
    sequences = {s.sequence_id: s for s in state.running}
    return StepDone(plan.plan_id, tuple(result(sequences[row.sequence_id]) for row in plan.rows), 0)


def result(sequence: Sequence) -> RowResult:
    num_full, num_named = (sequence.num_tokens + 1) // BLOCK_SIZE, len(sequence.block_hashes)
    names = tuple(name(sequence.sequence_id, i) for i in range(num_named, num_full))
    if sequence.num_tokens + 1 == sequence.request.prompt_len + sequence.request.max_tokens:
        return RowResult(sequence.sequence_id, 1, "length", names)
    return RowResult(sequence.sequence_id, 1, None, names)


def arrival(sequence_id: int, num_blocks: int) -> Arrived:
    """An urgent request of that many blocks, none of them in the cache."""
    names = tuple(name(sequence_id, i) for i in range(num_blocks))
    return Arrived(Request(sequence_id, num_blocks * BLOCK_SIZE, 100, -1), names, 0)


def name(sequence_id: int, index: int) -> bytes:
    """Thirty-two bytes, as long as a hash and different for every block."""
    return b"%16d%16d" % (sequence_id, index)


WARM_NAMES = tuple(name(10**9, i) for i in range(NUM_BLOCKS))


def repeated(state: State, event: Event) -> list[float]:
    """Times of the same event from the same state, which is a value and so can be used again."""
    spare_collections()
    times_us = [timed(state, event)[0]]
    while len(times_us) < NUM_REPEATS and sum(times_us) < MAX_REPEATS_US:
        times_us.append(timed(state, event)[0])
    return times_us


def timed(state: State, event: Event) -> tuple[float, State]:
    start_ns = time.thread_time_ns()
    state, _ = update(state, event)
    return (time.thread_time_ns() - start_ns) / 1000, state


def figure_of(what: str, times_us: list[float], limit_us: float | None, setting: dict[str, Any]) -> Figure:
    times_us = sorted(times_us)
    best, median, p99 = (times_us[round(q * (len(times_us) - 1))] for q in (0.0, 0.5, 0.99))
    spread = {"best": round(best, 1), "median": round(median, 1), "p99": round(p99, 1)}
    return {"what": what, **setting, **spread, "limit": limit_us, "calls": len(times_us)}


def line(figure: Figure) -> str:
    known = ("what", "best", "median", "p99", "limit", "calls")
    setting = " ".join(f"{key}={value}" for key, value in figure.items() if key not in known)
    times = f"best {figure['best']:9.1f}  median {figure['median']:9.1f}  p99 {figure['p99']:9.1f}"
    limit = f"  limit {figure['limit']:.1f}" if figure["limit"] else ""
    return f"{figure['what']:<22} {setting:<32} {times}{limit}"


if __name__ == "__main__":
    main()
