"""A configuration that cannot work is refused by the name of the flag that mends it."""

import pytest

from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.errors import ConfigError


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"block_size": 0}, "--block-size"),
        ({"block_size": 12}, "--block-size 16"),
        ({"num_blocks": 0}, "--num-blocks"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_model_len": -1}, "--max-model-len"),
        ({"max_queued_requests": 0}, "--max-queued-requests"),
        ({"max_queued_tokens": 0}, "--max-queued-tokens"),
        ({"num_host_blocks": -1}, "--num-host-blocks"),
        ({"num_disk_blocks": -1}, "--num-disk-blocks"),
        ({"swap_us_per_block": -1}, "--swap-us-per-block"),
        ({"recompute_us_per_token": -1}, "--recompute-us-per-token"),
        ({"preemption_method": "prayer"}, "--preemption-method"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "--max-num-batched-tokens"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, "--no-enable-chunked-prefill"),
    ],
    ids=str,
)
def test_an_impossible_configuration_names_its_flag(change, advice):
    with pytest.raises(ConfigError, match=advice):
        SchedulerConfig(**change)


def test_configurations_are_frozen():
    with pytest.raises(AttributeError):
        SchedulerConfig().block_size = 32


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_a_block_more_is_needed_as_soon_as_the_last_is_full(num_tokens, num_blocks):
    assert num_blocks_for(num_tokens, 16) == num_blocks
