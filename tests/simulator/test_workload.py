"""Mixes of traffic are functions of their seeds."""

import math

import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.simulator.workload import Traffic, mix, unique_names

CHAT = {"num_requests": 200, "rate": 10.0, "prompt_median": 100, "output_median": 20}


def test_lengths_spread_around_their_median_within_their_limits():
    requests = mix(Traffic(**CHAT, prompt_sigma=1.0, max_prompt_len=300))
    lengths = sorted(r.prompt_len for r in requests)
    assert 80 < lengths[100] < 125
    assert lengths[-1] == 300
    assert {r.output_len for r in requests} == {20}


def test_arrivals_keep_their_rate_and_an_infinite_one_sends_all_at_once():
    assert mix(Traffic(**CHAT))[-1].arrival_us == pytest.approx(20e6, rel=0.2)
    assert {r.arrival_us for r in mix(Traffic(**CHAT | {"rate": math.inf}, start_s=2.0))} == {2_000_000}


def test_a_mix_is_in_order_of_arrival_and_repeats():
    traffic = Traffic(**CHAT), Traffic(**CHAT, priority=-1, seed=1)
    requests = mix(*traffic)
    assert [r.arrival_us for r in requests] == sorted(r.arrival_us for r in requests)
    assert requests == mix(*traffic)


def test_traffic_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="rate"):
        Traffic(**CHAT | {"rate": 0})
    with pytest.raises(ConfigError, match="max_tokens"):
        Traffic(**CHAT, max_output_len=50, max_tokens=10)


def test_unique_names_differ_between_sequences_and_blocks():
    names = unique_names(1, 0, 3) + unique_names(2, 0, 3)
    assert len(set(names)) == 6
    assert unique_names(1, 1, 2) == names[1:2]
