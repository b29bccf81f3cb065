"""Swap against recomputation by context, as `benchmarks/preemption.py` measures it."""

import runpy
from pathlib import Path

import pytest

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "preemption.py"), run_name="benchmark")


def job_e2e_us(cost, context):
    reports = {method: BENCHMARK["yielding_job"](cost, context, method) for method in BENCHMARK["METHODS"]}
    assert {method: report.preemptions[0].method for method, report in reports.items()}["swap"] == "swap"
    return {method: report.outcomes[0].e2e_us for method, report in reports.items()}


def test_a_short_context_is_computed_again_for_free_and_a_long_one_is_better_swapped():
    short, long = (job_e2e_us("h200-like", context) for context in (64, 4096))
    assert short["recompute"] < short["swap"]
    assert long["swap"] < 0.85 * long["recompute"]


def test_over_a_slow_link_recomputation_is_better_and_auto_chooses_it():
    e2e_us = job_e2e_us("h200-like, 3 GB/s", 2048)
    assert e2e_us["auto"] == e2e_us["recompute"] < 0.95 * e2e_us["swap"]


@pytest.mark.parametrize("cost", ["h200-like", "cpu-xla"])
@pytest.mark.parametrize("context", [64, 512, 4096])
def test_auto_is_within_one_percent_of_the_better_one_on_the_presets(cost, context):
    e2e_us = job_e2e_us(cost, context)
    assert e2e_us["auto"] <= 1.01 * min(e2e_us["swap"], e2e_us["recompute"])
