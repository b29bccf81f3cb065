"""A scheduler under a flood: every tenant always has requests in line. Fast, for runs of many thousand steps.

Service is counted here once more from the plans alone, as its definition says and not as the scheduler does it.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Effect, Finish, Preempt, RunStep
from pagedjax.core.events import Arrived, Event, StepDone, StepDue
from pagedjax.core.invariants import check
from pagedjax.core.plan import Row, RowResult, StepPlan
from pagedjax.core.request import Request
from pagedjax.core.scheduler import init, update
from pagedjax.core.state import State

Lengths = Callable[[random.Random], tuple[int, int]]


def same_lengths(rng: random.Random) -> tuple[int, int]:
    """Prompts and outputs of 64 tokens."""
    return 64, 64


def mixed_lengths(rng: random.Random) -> tuple[int, int]:
    """Most requests short, a few long, as in a chat service's log: medians of about 150 and 60 tokens."""
    return min(1500, int(rng.lognormvariate(5.0, 1.0)) + 1), min(400, int(rng.lognormvariate(4.1, 0.9)) + 1)


@dataclass(slots=True)
class Source:
    """One tenant's requests: it keeps `depth` of them in line."""

    tenant: str
    lengths: Lengths = same_lengths
    priority: int = 0
    depth: int = 4


class Flood:
    """`step` is a step of `step_us`. `service` counts what each tenant got; `finished` says at which step who ended."""

    def __init__(self, config: SchedulerConfig, *sources: Source, seed: int = 0, step_us: int = 10_000) -> None:
        self.state: State = init(config)
        self.sources = list(sources)
        self.rng = random.Random(seed)
        self.step_us = step_us
        self.now_us = 0
        self.num_steps = 0
        self.service: Counter[str] = Counter()
        self.requests: dict[int, Request] = {}
        self.finished: dict[int, int] = {}
        self.preemptions: list[Preempt] = []
        self._num_sampled: Counter[int] = Counter()
        self._num_computed: Counter[int] = Counter()

    def step(self) -> None:
        for source in self.sources:
            while self.num_in_line(source.tenant) < source.depth:
                self.arrive(source.tenant, *source.lengths(self.rng), priority=source.priority)
        planned = any(isinstance(effect, RunStep) for effect in self.send(StepDue(self.now_us)))
        self.now_us += self.step_us
        if not planned or len(self.state.in_flight) == self.state.config.max_steps_in_flight:
            self.finish_oldest()
        self.num_steps += 1

    def num_in_line(self, tenant: str) -> int:
        queue = self.state.waiting.queues.get(tenant)
        return queue.num_requests if queue else 0

    def arrive(self, tenant: str, prompt_len: int, max_tokens: int, priority: int = 0) -> int:
        sequence_id = len(self.requests)
        request = self.requests[sequence_id] = Request(sequence_id, prompt_len, max_tokens, priority, tenant=tenant)
        self.send(Arrived(request, (), self.now_us))
        return sequence_id

    def finish_oldest(self) -> None:
        plan = self.state.in_flight[0]
        self.send(StepDone(plan.plan_id, tuple(self._result(row) for row in plan.rows), self.now_us))

    def send(self, event: Event) -> tuple[Effect, ...]:
        self.state, effects = update(self.state, event)
        for effect in effects:
            match effect:
                case RunStep(plan):
                    self._count(plan)
                case Preempt():
                    self.preemptions.append(effect)
                case Finish(sequence_id, _):
                    self.finished[sequence_id] = self.num_steps
        return effects

    def check(self) -> None:
        check(self.state)

    def _count(self, plan: StepPlan) -> None:
        for row in plan.rows:
            request, before = self.requests[row.sequence_id], self._num_computed[row.sequence_id]
            end = row.start + row.length
            new = min(end, request.prompt_len) - max(row.start, before)
            self.service[request.tenant] += max(0, new) + 2 * row.samples
            self._num_computed[row.sequence_id] = max(before, end)

    def _result(self, row: Row) -> RowResult:
        if not row.samples:
            return RowResult(row.sequence_id, 0)
        self._num_sampled[row.sequence_id] += 1
        last = self._num_sampled[row.sequence_id] == self.requests[row.sequence_id].max_tokens
        return RowResult(row.sequence_id, 1, "length" if last else None)
