"""The questions that are asked of a report, on reports small enough to answer by hand."""

from dataclasses import replace

import pytest

from pagedjax.core.config import SchedulerConfig
from pagedjax.simulator import H200_LIKE, SimRequest, simulate
from pagedjax.simulator.checks import most_overtaken, repreempted
from pagedjax.simulator.report import Preemption, summarise

CONFIG = SchedulerConfig(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=256, max_model_len=512)


def report_of(*requests, **policy):
    return simulate(replace(CONFIG, **policy), requests, H200_LIKE)


def preemption(sequence_id, num_executed):
    return Preemption(0, sequence_id, "recompute", "memory", 10, num_executed)


def test_first_come_first_served_overtakes_nobody():
    assert most_overtaken(report_of(*(SimRequest(i, 32, 4) for i in range(5)))) == 0


def test_whoever_is_passed_by_later_ones_of_its_own_priority_counts_them():
    report = report_of(*(SimRequest(i, 32, 4) for i in range(3)))
    late = replace(report.outcomes[0], wait_us=10**9)
    assert most_overtaken(replace(report, outcomes=(late, *report.outcomes[1:]))) == 2
    urgent = tuple(replace(o, request=o.request._replace(priority=-1)) for o in report.outcomes[1:])
    assert most_overtaken(replace(report, outcomes=(late, *urgent))) == 0


def test_only_a_second_preemption_too_soon_is_thrash():
    report = report_of(SimRequest(0, 32, 4))
    seen = (preemption(0, 3), preemption(1, 3), preemption(0, 15), preemption(1, 16))
    assert repreempted(replace(report, preemptions=seen), 16) == (seen[2],)


def test_a_question_takes_the_only_slot_of_a_job_whose_slice_is_over():
    report = report_of(SimRequest(0, 200, 60), SimRequest(100_000, 32, 2, priority=-1), time_slice=50)
    (switch,) = report.switches
    assert (report.preemptions_by("reason"), len(report.finished)) == ({"priority": 1}, 2)
    assert report.outcomes[1].wait_us <= switch.dispatched_us - switch.decided_us + 10_000
    assert report.outcomes[0].parked_us > 0


def test_a_job_that_is_not_preemptible_keeps_its_slot():
    requests = (SimRequest(0, 200, 60, preemptible=False), SimRequest(100_000, 32, 2, priority=-1))
    report = report_of(*requests)
    assert report.preemptions == ()
    assert report.outcomes[1].token_us[0] > report.outcomes[0].token_us[-1]


def test_what_is_computed_again_counts_as_lost_device_time():
    """A victim computes again what others had to evict, and nothing else."""
    requests = (SimRequest(0, 200, 60), SimRequest(100_000, 150, 2, priority=-1))
    kept, lost = (report_of(*requests, num_blocks=num_blocks, max_num_seqs=1) for num_blocks in (100, 17))
    assert kept.totals.recomputed_tokens == 0
    assert lost.totals.recomputed_tokens > 100
    assert lost.preemption_overhead > kept.preemption_overhead


def test_a_summary_of_nothing_is_none_and_percentiles_lie_between_ranks():
    assert summarise([]) is None
    assert summarise(range(101))[1:] == pytest.approx((50, 90, 99, 100))
