"""Workloads: the same seed gives the same requests; rates and burstiness come out as asked."""

import math
import statistics

import pytest

from pagedjax.bench.traces import Arrival
from pagedjax.bench.workload import WORDS, LengthRange, WorkloadConfig, arrival_times, replay, synthetic
from pagedjax.core.errors import ConfigError


def make_config(**changes) -> WorkloadConfig:
    fields = {"num_prompts": 8, "input_len": LengthRange(4, 9), "output_len": LengthRange(2, 5)}
    return WorkloadConfig(**(fields | changes))


def test_equal_seeds_give_equal_requests():
    assert synthetic(make_config(seed=3)) == synthetic(make_config(seed=3))
    assert synthetic(make_config(seed=3)) != synthetic(make_config(seed=4))


def test_lengths_stay_in_their_ranges_and_reach_both_ends():
    requests = synthetic(make_config(num_prompts=300))
    assert {request.prompt_len for request in requests} == set(range(4, 10))
    assert {request.max_tokens for request in requests} == set(range(2, 6))


def test_a_text_prompt_has_a_word_for_each_token():
    for request in synthetic(make_config()):
        words = request.prompt.split()
        assert len(words) == request.prompt_len
        assert set(words) <= set(WORDS)


def test_an_id_prompt_has_ids_of_the_range():
    for request in synthetic(make_config(symbols=range(10, 20))):
        assert len(request.prompt) == request.prompt_len
        assert set(request.prompt) <= set(range(10, 20))


def test_changing_the_rate_keeps_prompts_and_lengths():
    burst, paced = synthetic(make_config()), synthetic(make_config(request_rate=2.0))
    assert [r.prompt for r in burst] == [r.prompt for r in paced]
    assert [r.max_tokens for r in burst] == [r.max_tokens for r in paced]


def test_requests_share_the_prefix_of_their_group_and_nothing_more():
    requests = synthetic(make_config(prefix_len=20, num_prefixes=2, symbols=range(1000)))
    prefixes = [request.prompt[:20] for request in requests]
    assert len(set(prefixes[0::2])) == len(set(prefixes[1::2])) == 1
    assert prefixes[0] != prefixes[1]
    assert len({request.prompt[20:] for request in requests}) == len(requests)


def test_an_infinite_rate_sends_all_at_once():
    assert arrival_times(5, math.inf, 1.0, seed=0) == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness):
    times = arrival_times(20_000, 5.0, burstiness, seed=1)
    gaps = [b - a for a, b in zip([0.0, *times], times)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 5.0, rel=0.05)
    # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize(
    "change",
    [
        {"num_prompts": 0},
        {"prefix_len": -1},
        {"num_prefixes": 0},
        {"request_rate": 0.0},
        {"request_rate": math.nan},
        {"burstiness": 0.0},
        {"burstiness": math.inf},
    ],
)
def test_values_out_of_range_are_refused_by_their_flag(change):
    with pytest.raises(ConfigError, match="--" + next(iter(change)).replace("_", "-")):
        make_config(**change)


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (-2, -1)])
def test_a_length_range_must_rise_from_one(low, high):
    with pytest.raises(ConfigError, match="1 <= low <= high"):
        LengthRange(low, high)


def test_equal_hash_ids_become_equal_blocks():
    first, second = replay([Arrival(0.0, 1100, 3, (7, 8, 9)), Arrival(1.0, 1100, 3, (7, 8, 10))], symbols=range(5000))
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:] != second.prompt[1024:]
    assert len(first.prompt) == len(second.prompt) == 1100


def test_traces_without_hash_ids_share_nothing():
    first, second = replay([Arrival(0.0, 50, 3), Arrival(0.0, 50, 3)], symbols=range(5000))
    assert first.prompt != second.prompt


def test_a_replay_scales_times_and_cuts_lengths():
    arrivals = [Arrival(0.0, 100, 30), Arrival(4.0, 10, 2)]
    requests = replay(arrivals, time_scale=0.5, max_input_len=40, max_output_len=20)
    assert [(r.due_s, r.prompt_len, r.max_tokens) for r in requests] == [(0.0, 40, 20), (2.0, 10, 2)]


def test_a_cut_prompt_keeps_its_shared_prefix():
    whole, cut = (replay([Arrival(0.0, 1100, 3, (7, 8, 9))], max_input_len=limit)[0] for limit in (None, 600))
    assert whole.prompt.startswith(cut.prompt)


@pytest.mark.parametrize("time_scale", [-1.0, math.inf, math.nan])
def test_a_time_scale_out_of_range_is_refused(time_scale):
    with pytest.raises(ConfigError, match="--time-scale"):
        replay([Arrival(0.0, 1, 1)], time_scale=time_scale)
