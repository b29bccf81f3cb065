"""What an accelerator's memory is taken by before the cache: on a device that is not there."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.runtime import device_memory
from pagedjax.runtime.config import RuntimeConfig
from pallas_kernels.ragged_attention import xla
from tests.runtime.tiny import CONFIG, SCHEDULER, make_model

TYPES = {"backend": xla.BACKEND, "dtype": jnp.float32, "cache_dtype": jnp.float32}


class FakeGpu:
    platform = "gpu"

    def __init__(self, stats):
        self.memory_stats = lambda: stats

    def __str__(self):
        return "cuda:0"


@pytest.fixture
def measure(monkeypatch):
    def measured(stats, scheduler=SCHEDULER, **runtime):
        monkeypatch.setattr(jax, "devices", lambda: [FakeGpu(stats)])
        return device_memory.measure(make_model(), CONFIG, scheduler, RuntimeConfig(**runtime), **TYPES)

    return measured


def test_a_cpu_has_none_of_its_own():
    assert device_memory.measure(make_model(), CONFIG, SCHEDULER, RuntimeConfig(), **TYPES) is None


def test_the_account_has_the_allocators_limit_and_what_the_compiler_says(measure):
    found = measure({"bytes_limit": 1000, "bytes_in_use": 300}, memory_share=0.5)
    assert (found.limit, found.used) == (500, 300)
    # A step's hidden states and its logits, twice, and the state of penalties.
    hidden, logits = 4 * SCHEDULER.max_num_batched_tokens * CONFIG.hidden_size, 4 * 16 * CONFIG.vocab_size
    assert found.activations > 2 * (hidden + logits) + 4 * (SCHEDULER.max_num_seqs + 1) * CONFIG.vocab_size
    assert found.activations < 10**7


def test_larger_batches_take_more(measure):
    larger = dataclasses.replace(SCHEDULER, max_num_batched_tokens=256)
    little, much = (measure({"bytes_limit": 1000}, scheduler).activations for scheduler in (SCHEDULER, larger))
    assert much > little + 2 * 4 * (256 - SCHEDULER.max_num_batched_tokens) * CONFIG.hidden_size


def test_an_accelerator_that_tells_nothing_is_refused_with_the_flag(measure):
    with pytest.raises(ConfigError, match=r"cuda:0 does not tell .*--num-gpu-blocks-override"):
        measure(None)


def test_temporaries_share_a_place_and_outputs_live_while_steps_are_in_flight():
    def program(temp, output, alias):
        sizes = {"temp_size_in_bytes": temp, "output_size_in_bytes": output, "alias_size_in_bytes": alias}
        return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes))

    programs = [program(100, 1010, 1000), program(70, 20, 0)]
    assert device_memory.activation_bytes(programs, 1) == 100 + 30
    assert device_memory.activation_bytes(programs, 2) == 100 + 60
