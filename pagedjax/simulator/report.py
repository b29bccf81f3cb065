"""What a simulation gives: what became of each request, and figures drawn from that.

TTFT runs from arrival to the first token, ITL between a request's successive tokens, E2E from arrival to the last one;
TPOT is (last - first token) / (tokens - 1). Times are virtual microseconds.
"""

import math
from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.plan import Tier
from pagedjax.simulator.cost import CostModel
from pagedjax.simulator.workload import SimRequest


class Status(StrEnum):
    FINISHED = "finished"
    REJECTED = "rejected"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. `token_us` are the times of its tokens (an array: eight bytes each, and a day's trace
    has millions). `wait_us` passed before it was first planned, `parked_us` between preemptions and what resumed it."""

    sequence_id: int
    request: SimRequest
    status: Status
    token_us: "array[int]"  # a subscript only from Python 3.12 on
    wait_us: int | None
    parked_us: int
    num_preemptions: int
    num_recomputed: int

    @property
    def ttft_us(self) -> int:
        return self.token_us[0] - self.request.arrival_us

    @property
    def e2e_us(self) -> int:
        return self.token_us[-1] - self.request.arrival_us

    @property
    def tpot_us(self) -> float:
        """0 for a single token, which has no gap."""
        return (self.token_us[-1] - self.token_us[0]) / max(1, len(self.token_us) - 1)


class Preemption(NamedTuple):
    """`num_tokens` were lost with it; `num_executed` were computed for the sequence since it had (re)started."""

    now_us: int
    sequence_id: int
    method: str
    reason: str
    num_tokens: int
    num_executed: int


class Switch(NamedTuple):
    """From the decision that a sequence must yield to a better-ranked one until the step with that one's first row was
    dispatched."""

    decided_us: int
    dispatched_us: int


class Usage(NamedTuple):
    """How full the device's pool was after a step was planned: blocks held, and the positions of their slots that are
    planned (written, or being written by a step in flight) and those that are computed."""

    now_us: int
    num_running: int
    num_waiting: int
    held_blocks: int
    planned_slots: int
    computed_slots: int


class Transfer(NamedTuple):
    """Blocks on their way between tiers; `to_device` says which. `start_us` is when it was asked for."""

    start_us: int
    end_us: int
    tier: Tier
    to_device: bool
    num_blocks: int


class Service(NamedTuple):
    """What one tenant had got by then: 1 for each prompt token computed for the first time, 2 for each token sampled
    and kept (the scheduler's own measure, counted apart from it)."""

    now_us: int
    num_tokens: int


class Totals(NamedTuple):
    """Sums over the run. `busy_us` is the device's working time, `lost_us` the part of it that preemption cost: tokens
    computed again, blocks copied. The three `_slot_us` integrate `Usage` over time."""

    num_steps: int = 0
    busy_us: int = 0
    lost_us: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    discarded_tokens: int = 0
    held_slot_us: int = 0
    planned_slot_us: int = 0
    computed_slot_us: int = 0
    running_us: int = 0


class Limits(NamedTuple):
    """Upper bounds for goodput, in microseconds; None bounds nothing."""

    ttft_us: float | None = None
    tpot_us: float | None = None
    e2e_us: float | None = None


class Summary(NamedTuple):
    """A distribution, in the unit of its values."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReport:
    """One simulation. Outcomes are in order of arrival, everything else in order of time."""

    config: SchedulerConfig
    cost: CostModel
    end_us: int
    outcomes: tuple[Outcome, ...]
    preemptions: tuple[Preemption, ...]
    switches: tuple[Switch, ...]
    usage: tuple[Usage, ...]
    transfers: tuple[Transfer, ...]
    service: Mapping[str, tuple[Service, ...]]
    totals: Totals

    @property
    def finished(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status is Status.FINISHED)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(len(outcome.token_us) for outcome in self.outcomes) / max(1, self.end_us) * 1e6

    @property
    def requests_per_s(self) -> float:
        return len(self.finished) / max(1, self.end_us) * 1e6

    def goodput_requests_per_s(self, limits: Limits) -> float:
        """Finished requests a second that kept every bound."""
        return sum(_meets(outcome, limits) for outcome in self.finished) / max(1, self.end_us) * 1e6

    @property
    def waste(self) -> float:
        """The share of held slots that nothing was planned for, over time: the empty ends of last blocks."""
        return 1 - self.totals.planned_slot_us / max(1, self.totals.held_slot_us)

    @property
    def waste_until_computed(self) -> float:
        """The same where a slot counts as used only once its step is done."""
        return 1 - self.totals.computed_slot_us / max(1, self.totals.held_slot_us)

    @property
    def preemption_overhead(self) -> float:
        """The share of the device's working time that preemption cost."""
        return self.totals.lost_us / max(1, self.totals.busy_us)

    @property
    def mean_running(self) -> float:
        """Running sequences over the time in which there was any."""
        return self.totals.running_us / max(1, self.totals.busy_us)

    def preemptions_by(self, field: str) -> dict[str, int]:
        """How many preemptions there were by their `method` or `reason`."""
        return dict(Counter(getattr(preemption, field) for preemption in self.preemptions))

    def service_between(self, tenant: str, start_us: int, end_us: int) -> int:
        """The service that a tenant got after `start_us` and until `end_us`."""
        samples = self.service.get(tenant, ())
        before, after = (bisect(samples, (now_us, math.inf)) for now_us in (start_us, end_us))
        return (samples[after - 1].num_tokens if after else 0) - (samples[before - 1].num_tokens if before else 0)

    def swapped_bytes(self, *, to_device: bool) -> int:
        num_blocks = sum(t.num_blocks for t in self.transfers if t.to_device is to_device)
        return num_blocks * self.cost.block_bytes

    def ttft_ms(self) -> Summary | None:
        return summarise(outcome.ttft_us / 1e3 for outcome in self.finished)

    def e2e_ms(self) -> Summary | None:
        return summarise(outcome.e2e_us / 1e3 for outcome in self.finished)

    def tpot_ms(self) -> Summary | None:
        return summarise(outcome.tpot_us / 1e3 for outcome in self.finished if len(outcome.token_us) > 1)

    def wait_ms(self) -> Summary | None:
        return summarise(outcome.wait_us / 1e3 for outcome in self.outcomes if outcome.wait_us is not None)

    def itl_ms(self) -> Summary | None:
        gaps = [np.diff(np.frombuffer(outcome.token_us, np.int64)) for outcome in self.finished]
        return summarise(np.concatenate(gaps) / 1e3) if gaps else None


def summarise(values: Iterable[float]) -> Summary | None:
    """Mean and percentiles, between ranks by linear interpolation; None of nothing."""
    # numpy: the gaps of a real trace are four million, at 1.5 s sorted in Python.
    found = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    if not found.size:
        return None
    p50, p90, p99 = np.percentile(found, (50, 90, 99))
    return Summary(float(found.mean()), float(p50), float(p90), float(p99), float(found.max()))


def _meets(outcome: Outcome, limits: Limits) -> bool:
    seen = ((limits.ttft_us, outcome.ttft_us), (limits.tpot_us, outcome.tpot_us), (limits.e2e_us, outcome.e2e_us))
    return all(bound is None or value <= bound for bound, value in seen)
