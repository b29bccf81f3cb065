"""The tuning story on the committed mixes: thrash at short slices, recovery at longer ones, little cost otherwise."""

from dataclasses import replace

import pytest

from pagedjax.core.presets import PRESETS
from pagedjax.simulator import simulate
from pagedjax.simulator.checks import repreempted
from pagedjax.simulator.mixes import CROWDED, EVERYDAY, INTERACTIVE, LONG_PROMPTS


def run(mix, **policy):
    return simulate(replace(mix.config, **policy), mix.requests(), mix.cost)


def p99_ttft_ms(report):
    ttft_us = sorted(o.ttft_us for o in report.finished if o.request.priority == INTERACTIVE)
    return ttft_us[round(0.99 * (len(ttft_us) - 1))] / 1e3


@pytest.fixture(scope="module")
def crowded():
    return {ms: run(CROWDED, time_slice=ms) for ms in (50, 150, 500)}


@pytest.fixture(scope="module")
def everyday():
    return {ms: run(EVERYDAY, time_slice=ms) for ms in (50, 150)}


def test_on_the_crowded_mix_150_ms_give_a_fifth_more_throughput_than_50_and_little_over_half_the_latency(crowded):
    assert crowded[150].output_tokens_per_s >= 1.2 * crowded[50].output_tokens_per_s
    assert crowded[150].e2e_ms().p50 <= 0.6 * crowded[50].e2e_ms().p50


def test_short_slices_thrash_and_long_ones_do_not(crowded):
    overheads = [crowded[ms].preemption_overhead for ms in (50, 150, 500)]
    assert 0.1 < overheads[0] <= 0.15
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[2] < 0.01


def test_preemption_costs_little_where_blocks_stay_until_they_are_needed(everyday):
    assert len(everyday[50].preemptions) > 50
    assert all(report.preemption_overhead <= 0.05 for report in everyday.values())


@pytest.mark.parametrize("mix", [EVERYDAY, CROWDED, LONG_PROMPTS], ids=["everyday", "crowded", "long prompts"])
def test_the_interactive_preset_costs_at_most_five_percent(mix):
    report = run(mix, **PRESETS["interactive"])
    assert report.preemptions
    assert report.preemption_overhead <= 0.05


def test_under_the_interactive_preset_questions_wait_no_longer_than_with_slices_of_20_ms():
    found = run(EVERYDAY, **PRESETS["interactive"])
    assert p99_ttft_ms(found) <= 1.02 * p99_ttft_ms(run(EVERYDAY, **PRESETS["interactive"] | {"time_slice": 20}))


def test_questions_wait_less_with_preemption_and_everybody_finishes(everyday):
    without = run(EVERYDAY, enable_preemption=False)
    assert p99_ttft_ms(everyday[50]) < 0.6 * p99_ttft_ms(without)
    assert everyday[50].output_tokens_per_s >= 0.85 * without.output_tokens_per_s
    assert len(everyday[50].finished) == len(without.finished) == len(EVERYDAY.requests())


@pytest.mark.parametrize("mode", ["aggressive", "conservative"])
def test_documents_beyond_8k_tokens_finish_though_they_yield(mode):
    report = run(LONG_PROMPTS, preemption_mode=mode)
    assert max(o.request.prompt_len for o in report.outcomes) > 8192
    assert len(report.finished) == len(report.outcomes)
    assert report.preemptions
    assert report.preemption_overhead <= 0.05


def test_nobody_is_preempted_again_within_a_chunk(crowded, everyday):
    for report in (*crowded.values(), *everyday.values()):
        assert repreempted(report, report.config.min_execution_chunk) == ()


def test_a_switch_to_the_beneficiary_takes_at_most_the_steps_in_flight(everyday):
    switches_us = [s.dispatched_us - s.decided_us for s in everyday[150].switches]
    longest_step_us = 2048 * EVERYDAY.cost.us_per_token + 50_000
    assert len(switches_us) == everyday[150].preemptions_by("reason")["priority"]
    assert 0 < max(switches_us) <= 2 * longest_step_us
