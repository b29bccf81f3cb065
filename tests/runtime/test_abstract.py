"""Programs from shapes alone are those that the runner compiles; a split model computes what a whole one does."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.models import sharding
from pagedjax.runtime import abstract
from pallas_kernels.ragged_attention import reference, xla
from tests.runtime.tiny import CONFIG, SCHEDULER, make_runner

ROOT = Path(__file__).parents[2]


def test_programs_from_shapes_are_those_of_the_runner():
    jobs = abstract.jobs(CONFIG, SCHEDULER, backend=xla.BACKEND, dtype=jnp.float32)
    runner = make_runner(pools={})
    runner.warm_up()
    names = {(job.name, job.size) for job in jobs if job.name not in ("gather", "scatter")}
    assert names == {(name, size) for name in {job.name for job in jobs} for size in runner.programs.sizes(name)}


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_a_steps_cache_is_as_large_as_the_runners(cache_dtype):
    step = abstract.jobs(CONFIG, SCHEDULER, backend=reference.BACKEND, dtype=jnp.float32, cache_dtype=cache_dtype)[0]
    assert step.name == "step"
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.inputs[1]))
    shape = SCHEDULER.block_size, CONFIG.num_kv_heads, CONFIG.head_dim
    per_block = reference.BACKEND.block_bytes(*shape, cache_dtype or "float32")
    assert num_bytes == SCHEDULER.num_blocks * CONFIG.num_layers * per_block


def test_shapes_take_no_memory_for_weights_that_no_machine_could_hold():
    large = CONFIG.__class__(
        architecture="LlamaForCausalLM",
        vocab_size=10**6,
        hidden_size=2**17,
        intermediate_size=2**20,
        num_layers=2,
        num_heads=1024,
        num_kv_heads=128,
        head_dim=128,
    )
    jobs = abstract.jobs(large, SCHEDULER, backend=xla.BACKEND, dtype=jnp.bfloat16)
    assert sum(leaf.size for leaf in jax.tree.leaves(jobs[0].inputs)) > 10**12


def test_a_split_model_computes_what_a_whole_one_does():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.runtime.split_step"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-4


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="num_kv_heads 2, vocab_size 301 cannot be split over 4 devices"):
        sharding.shard_of(CONFIG, 4)
