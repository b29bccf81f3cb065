"""What an accelerator's memory is taken by before the KV cache gets the rest: weights, and a step's working memory.

The worst batch is not run: its programs are compiled, and the compiler says how much they take. Programs run one after
the other, so their temporaries share one place; what they hand on lives as long as its step is in flight.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import ConfigError
from pagedjax.models.config import ModelConfig
from pagedjax.models.stack import init_caches
from pagedjax.runtime import programs
from pagedjax.runtime.config import RuntimeConfig, shapes_for
from pagedjax.runtime.programs import Job
from pallas_kernels.ragged_attention import AttentionBackend

# The largest of each kind is the worst of it; others are small beside these.
_KINDS = ("step", "decode", "head", "sample", "adjust", "score")


class DeviceMemory(NamedTuple):
    """Bytes of one device: what JAX's allocator may give in all, what it has given (the model, mostly), and what steps
    will take beside the cache."""

    limit: int
    used: int
    activations: int

    @property
    def free(self) -> int:
        """What is left for a KV cache."""
        return max(self.limit - self.used - self.activations, 0)


def measure(
    model: nnx.Module,
    config: ModelConfig,
    scheduler: SchedulerConfig,
    runtime: RuntimeConfig,
    *,
    backend: AttentionBackend,
    dtype: Any,
    cache_dtype: Any,
) -> DeviceMemory | None:
    """The first device's memory as it is with the model loaded; None where there is no accelerator.

    Raises ConfigError for an accelerator that does not tell its memory.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(f"{device} does not tell how much memory it has; set --num-gpu-blocks-override")
    jobs = worst_jobs(model, config, scheduler, backend=backend, dtype=dtype, cache_dtype=cache_dtype)
    compiled = compile_all(jobs, runtime)
    penalties = 4 * (scheduler.max_num_seqs + 1) * config.vocab_size
    activations = activation_bytes(compiled, scheduler.max_steps_in_flight) + penalties
    return DeviceMemory(int(stats["bytes_limit"] * runtime.memory_share), stats.get("bytes_in_use", 0), activations)


def worst_jobs(
    model: nnx.Module,
    config: ModelConfig,
    scheduler: SchedulerConfig,
    *,
    backend: AttentionBackend,
    dtype: Any,
    cache_dtype: Any,
) -> list[Job]:
    """The largest program of each kind, over a cache of one sequence: temporaries do not grow with the cache."""
    shapes = shapes_for(scheduler)
    sizes = {"num_blocks": shapes.table_width, "block_size": scheduler.block_size, "dtype": cache_dtype}
    caches = jax.eval_shape(lambda: init_caches(config, backend, **sizes))
    parts = programs.split_model(model, jax.ShapeDtypeStruct((1, config.hidden_size), jnp.dtype(dtype)))
    jobs = programs.jobs(
        parts,
        shapes,
        caches,
        scheduler.max_num_seqs,
        config,
        dtype,
        decodes=backend.prefers_decode_programs,
    )
    largest: dict[str, Job] = {}
    for job in jobs:
        if job.name in _KINDS and job.size > getattr(largest.get(job.name), "size", 0):
            largest[job.name] = job
    return list(largest.values())


def compile_all(jobs: Iterable[Job], runtime: RuntimeConfig) -> list[Any]:
    """Compiled programs, to be asked for their memory."""
    with ThreadPoolExecutor(runtime.num_compile_threads) as pool:
        return list(pool.map(lambda job: programs.compile_job(job, runtime.compiler_options), jobs))


def activation_bytes(compiled: Iterable[Any], num_in_flight: int) -> int:
    """Bytes beside weights and cache that steps of these programs take, `num_in_flight` of them at a time."""
    every = [program.memory_analysis() for program in compiled]
    outputs = sum(memory.output_size_in_bytes - memory.alias_size_in_bytes for memory in every)
    return max(memory.temp_size_in_bytes for memory in every) + num_in_flight * outputs
