"""Questions asked of a finished simulation: did anybody starve or thrash, and what did paging save?"""

from bisect import bisect, insort
from itertools import pairwise

from pagedjax.simulator.report import Preemption, SimReport


def repreempted(report: SimReport, min_tokens: int) -> tuple[Preemption, ...]:
    """Preemptions of sequences that had been preempted before and computed less than `min_tokens` since: thrash."""
    seen: set[int] = set()
    found = []
    for preemption in report.preemptions:
        if preemption.sequence_id in seen and preemption.num_executed < min_tokens:
            found.append(preemption)
        seen.add(preemption.sequence_id)
    return tuple(found)


def most_overtaken(report: SimReport) -> int:
    """The largest number of requests that arrived after one of the same tenant and priority and yet ran before it.

    First come, first served gives 0, ties in a step not counted.
    """
    lines: dict[tuple[str, int], list[int]] = {}
    for outcome in report.outcomes:
        if outcome.wait_us is not None:
            request = outcome.request
            started_us = lines.setdefault((request.tenant, request.priority), [])
            started_us.append(request.arrival_us + outcome.wait_us)
    most = 0
    for line in lines.values():
        behind: list[int] = []  # when those behind started, rising
        for started in reversed(line):
            most = max(most, bisect(behind, started - 1))
            insort(behind, started)
    return most


def saturated_concurrency(report: SimReport) -> float:
    """Running sequences over the time in which somebody waited for room; 0 if nobody ever did."""
    weighted = total_us = 0
    for sample, following in pairwise(report.usage):
        if sample.num_waiting:
            total_us += following.now_us - sample.now_us
            weighted += sample.num_running * (following.now_us - sample.now_us)
    return weighted / max(1, total_us)


def contiguous_concurrency(report: SimReport, max_model_len: int) -> int:
    """Sequences that fit the same memory where each reserves `max_model_len` tokens."""
    return report.config.num_blocks * report.config.block_size // max_model_len


def memory_beside_padding(report: SimReport, padded_len: int) -> float:
    """Slots held over time, as a share of those of a batch whose rows are padded to `padded_len` tokens."""
    return report.totals.held_slot_us / max(1, report.totals.running_us * padded_len)
