"""The cost model's arithmetic, and that the CPU preset repeats the steps that it was fitted to."""

from dataclasses import replace

import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.core.plan import Row, Scatter, StepPlan, Tier
from pagedjax.simulator import CPU_XLA, H200_LIKE, Link

# benchmarks/results/kernels.json at the commit that the preset names: (rows, context before, new tokens), milliseconds.
MEASURED = (
    ("decode 1, context 256", ((1, 255, 1),), 34.09),
    ("decode 1, context 4096", ((1, 4095, 1),), 64.62),
    ("decode 8, context 256", ((8, 255, 1),), 48.34),
    ("decode 32, context 256, pool of 512 MiB", ((32, 255, 1),), 118.36),
    ("decode 64, context 256", ((64, 255, 1),), 239.79),
    ("decode 64, context 64", ((64, 63, 1),), 134.36),
    ("decode 1 x 4096 + 63 x 64", ((1, 4095, 1), (63, 63, 1)), 152.33),
    ("prefill 256", ((1, 0, 256),), 271.12),
    ("prefill 256 after 1024", ((1, 1024, 256),), 505.5),
    ("prefill 8 x 32", ((8, 0, 32),), 263.4),
    ("mixed: decode 60 + prefill 196", ((60, 255, 1), (1, 0, 196)), 381.4),
)


def rows(*groups):
    return [Row(0, start, length, (), True) for num_rows, start, length in groups for _ in range(num_rows)]


@pytest.mark.parametrize(("groups", "ms"), [case[1:] for case in MEASURED], ids=[case[0] for case in MEASURED])
def test_the_cpu_preset_repeats_the_measured_steps(groups, ms):
    assert CPU_XLA.rows_us(rows(*groups)) / 1000 == pytest.approx(ms, rel=0.15)


def test_few_tokens_cost_what_reading_the_weights_costs():
    cost = replace(H200_LIKE, us_per_row=0, us_per_context_token=0, us_per_pair=0)
    assert cost.rows_us(rows((1, 0, 1))) == cost.rows_us(rows((64, 500, 1))) < cost.rows_us(rows((1, 0, 4096)))


def test_tokens_are_rounded_up_to_a_step_programs_size():
    cost = replace(CPU_XLA, us_per_row=0, us_per_context_token=0, us_per_pair=0)
    assert cost.rows_us(rows((1, 0, 130))) == cost.rows_us(rows((1, 0, 192))) < cost.rows_us(rows((1, 0, 193)))


def test_a_chunk_costs_more_the_more_context_lies_before_it():
    assert H200_LIKE.rows_us(rows((1, 8192, 512))) > H200_LIKE.rows_us(rows((1, 0, 512)))


def test_scatters_add_to_their_step():
    plan = StepPlan(0, tuple(rows((1, 0, 1))))
    scattering = replace(plan, scatters=(Scatter(0, ((0, 5), (1, 6))),))
    assert CPU_XLA.step_us(scattering) == CPU_XLA.step_us(plan) + 2 * CPU_XLA.us_per_block_copied


def test_a_transfer_takes_its_bytes_over_the_bandwidth():
    cost = replace(CPU_XLA, block_bytes=1000, host=Link(us_per_transfer=7, bytes_per_us=10))
    assert cost.transfer_us(Tier.HOST, 3) == 307
    assert cost.transfer_us(Tier.DISK, 3) == 1000 + 6


def test_costs_below_zero_are_refused_by_name():
    with pytest.raises(ConfigError, match="us_per_pair"):
        replace(CPU_XLA, us_per_pair=-1)
    with pytest.raises(ConfigError, match="bandwidth"):
        Link(us_per_transfer=0, bytes_per_us=0)
