"""Traffic like a real trace's through the scheduler: nobody starves, nothing thrashes, little memory is wasted."""

from pathlib import Path
from statistics import mean

import pytest

from pagedjax.bench.simulated import sim_requests
from pagedjax.bench.traces import Arrival, read_trace
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import ConfigError
from pagedjax.simulator import H200_LIKE, simulate
from pagedjax.simulator.checks import (
    contiguous_concurrency,
    memory_beside_padding,
    most_overtaken,
    repreempted,
    saturated_concurrency,
)
from pagedjax.simulator.workload import Traffic, mix

CONV_LIKE = read_trace(Path(__file__).parent / "traces" / "conv_like.csv")
SHORT = mix(
    Traffic(num_requests=300, rate=500, prompt_median=61, output_median=61, prompt_sigma=1, output_sigma=1,
            max_prompt_len=1000, max_output_len=1000)
)  # fmt: skip


def config(num_blocks, max_model_len=8192):
    return SchedulerConfig(
        num_blocks=num_blocks, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=max_model_len
    )


@pytest.fixture(scope="module")
def crowded():
    """Four times the real rate on a pool that holds a third of what would run."""
    requests = sim_requests(CONV_LIKE, block_size=16, max_model_len=8192, time_scale=0.25)
    return simulate(config(1200), requests, H200_LIKE)


def test_the_fixture_has_the_real_traces_statistics():
    assert mean(a.input_len for a in CONV_LIKE) == pytest.approx(1155, rel=0.15)
    assert mean(a.output_len for a in CONV_LIKE) == pytest.approx(211, rel=0.15)


def test_everybody_finishes_in_the_order_of_arrival_though_memory_is_short(crowded):
    assert len(crowded.finished) == len(CONV_LIKE)
    assert crowded.preemptions_by("reason")["memory"] > 5
    assert most_overtaken(crowded) == 0


def test_nobody_is_preempted_again_within_a_chunk(crowded):
    assert repreempted(crowded, crowded.config.min_execution_chunk) == ()


def test_at_most_one_percent_of_held_memory_is_wasted_on_conversations(crowded):
    assert 0 < crowded.waste <= 0.01


def test_conversations_up_to_2048_tokens_take_at_most_six_tenths_of_a_padded_batch():
    requests = sim_requests(CONV_LIKE, block_size=16, max_model_len=2048, time_scale=0)
    assert memory_beside_padding(simulate(config(2048, 2048), requests, H200_LIKE), 2048) <= 0.6


def test_short_requests_waste_at_most_four_percent_and_run_three_times_as_many_as_reservation_would():
    assert mean(r.prompt_len + r.output_len / 2 for r in SHORT) == pytest.approx(150, rel=0.1)
    report = simulate(config(1024, 2048), SHORT, H200_LIKE)
    assert 0 < report.waste <= 0.04
    assert saturated_concurrency(report) >= 3 * contiguous_concurrency(report, 2048) > 0


def test_equal_hash_ids_share_their_blocks():
    arrivals = [Arrival(0.0, 700, 4, (1, 2)), Arrival(9.0, 1000, 4, (1, 3))]
    requests = sim_requests(arrivals, block_size=16, max_model_len=2048)
    assert [len(r.block_names) for r in requests] == [700 // 16, 1000 // 16]
    assert simulate(config(1024), requests, H200_LIKE).totals.cached_tokens == 512


def test_blocks_that_do_not_fit_the_recorded_ones_are_refused():
    with pytest.raises(ConfigError, match="block_size 1024"):
        sim_requests(CONV_LIKE, block_size=1024, max_model_len=2048)
