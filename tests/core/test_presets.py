"""Presets are settings of the scheduler by name, and nothing else."""

import pytest

from pagedjax.core.config import SchedulerConfig, parse_weights
from pagedjax.core.errors import ConfigError
from pagedjax.core.presets import PRESETS

POLICY = set(PRESETS["mixed"])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_possible_configuration_and_sets_the_same_fields(name):
    assert set(PRESETS[name]) == POLICY
    SchedulerConfig(**PRESETS[name])


def test_mixed_is_what_the_scheduler_does_by_itself():
    assert SchedulerConfig(**PRESETS["mixed"]) == SchedulerConfig()


def test_a_long_prompt_is_shielded_by_the_preset_for_long_contexts():
    assert PRESETS["long-context"]["min_execution_chunk"] >= 8192


def test_weights_are_read_as_they_are_written():
    assert parse_weights("gold=3, silver=2,bronze=1") == (("bronze", 1), ("gold", 3), ("silver", 2))
    assert parse_weights("") == ()


@pytest.mark.parametrize("text", ["gold", "gold=", "=3", "gold=x", "gold=-1", "gold=0", "gold=1.5", "gold=1,gold=2"])
def test_weights_that_are_none_are_refused_by_their_flag(text):
    with pytest.raises(ConfigError, match="--tenant-weights"):
        parse_weights(text)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"preemption_mode": "bold"}, "--preemption-mode"),
        ({"preemption_strategy": "luck"}, "--preemption-strategy"),
        ({"time_slice": -1}, "--time-slice"),
        ({"min_execution_chunk": -1}, "--min-execution-chunk"),
        ({"max_wait_s": 0.0}, "--max-wait-s"),
        ({"max_wait_s": float("nan")}, "--max-wait-s"),
        ({"max_wait_s": float("inf")}, "--max-wait-s"),
        ({"fairness_threshold": 1.5}, "--fairness-threshold"),
        ({"fairness_threshold": float("nan")}, "--fairness-threshold"),
    ],
    ids=str,
)
def test_an_impossible_policy_names_its_flag(change, flag):
    with pytest.raises(ConfigError, match=flag):
        SchedulerConfig(**change)
