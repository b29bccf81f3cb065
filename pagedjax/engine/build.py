"""From a configuration to a warm engine: find the model, resolve what is automatic, load, compile."""

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import ConfigError
from pagedjax.core.plan import Tier
from pagedjax.engine.config import KV_CACHE_DTYPES, EngineConfig, claim_memory, resolve
from pagedjax.engine.engine import Engine
from pagedjax.engine.quantisation import WeightChoice, choose_layout
from pagedjax.engine.record import Recorder
from pagedjax.engine.tokenizer import load_tokenizer
from pagedjax.models.config import ModelConfig
from pagedjax.runtime import device_memory, kv_cache
from pagedjax.runtime.pools import make_pools
from pagedjax.runtime.runner import Runner
from pagedjax.runtime.swap import AnyPool, max_staging_bytes
from pagedjax.weights import load, store
from pagedjax.weights.pack import PackedWeight, describe
from pagedjax.weights.packed_cache import PackedCache
from pallas_kernels import dispatch
from pallas_kernels.ragged_attention import AttentionBackend, AttentionShape, AttentionVariant

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, progress: store.Progress | None = None) -> Engine:
    """An engine with its model loaded and every program compiled.

    Raises ConfigError for a model that cannot be found, read or held in memory, and for limits that do not fit it.
    """
    report = progress or _silent
    if config.enable_preemption is False and config.time_slice:
        # Not refused: a file or a preset may set the time slice, and a flag turn preemption off.
        logger.warning('event=no_effect setting=time_slice reason="enable_preemption is off"')
    memory_share = claim_memory(config.gpu_memory_utilization, config.swap_space)
    recorder = None if config.record is None else Recorder(Path(config.record))
    path = store.resolve(config.model, report)
    report("load", 0, 1)
    with load.open_checkpoint(path) as checkpoint:
        model_config = checkpoint.config
        encodings = frozenset(checkpoint.encodings.values())
        # What can be refused is, before anything that takes long.
        asked_dtype, config = config.dtype, resolve(config, model_config, platform=jax.default_backend())
        dtype = load.DTYPES[config.dtype]
        choice = choose_layout(config.quantization, asked_dtype=asked_dtype, dtype=dtype, encodings=encodings)
        backend = choose_attention(config, model_config)
        tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    tokenizer.check_fits(model_config.vocab_size)
    cache_dtype = jnp.dtype(KV_CACHE_DTYPES.get(config.kv_cache_dtype, dtype))
    bytes_per_block = kv_cache.block_bytes(model_config, backend, config.block_size, cache_dtype)
    weights: list[PackedWeight] = []
    cache = PackedCache(store.home_directory() / "packed")
    model = load.load_model(
        path, dtype=config.dtype, backend=backend, layout=choice.layout, note=weights.append, cache=cache
    )
    report("load", 1, 1)
    pools = make_pools(config.runtime, bytes_per_block)
    staging_bytes = max_staging_bytes(config.scheduler(1), bytes_per_block) if pools else 0
    runtime = replace(config.runtime, memory_share=memory_share)
    types = {"backend": backend, "dtype": dtype, "cache_dtype": cache_dtype}
    num_blocks = kv_cache.choose_num_blocks(
        runtime,
        config.scheduler(1),
        bytes_per_block,
        spared_bytes=staging_bytes,
        device=device_memory.measure(model, model_config, config.scheduler(1), runtime, **types),
    )
    logger.info(
        "event=resolved %s", chosen(config, backend.name, choice, weights, num_blocks, weights_cache=cache.outcome)
    )
    scheduler = with_tiers(config.scheduler(num_blocks), pools)
    runner = Runner(model, model_config, scheduler, runtime, pools=pools, **types)
    runner.warm_up(lambda done, total, label: report("compile", done, total))
    if pools:
        costs = runner.measure_costs()
        logger.info("event=measured %s", " ".join(f"{name}={value}" for name, value in costs._asdict().items()))
        scheduler = replace(scheduler, **costs._asdict())
    spare_collections()
    if recorder is not None:
        recorder.begin(scheduler)
    return Engine(config, scheduler, runner, tokenizer, recorder=recorder)


def choose_attention(config: EngineConfig, model: ModelConfig) -> AttentionBackend:
    """The attention backend for this machine, or the one that was asked for. Raises ConfigError with the reasons."""
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, config.block_size)
    try:
        choice = dispatch.choose(
            "ragged_attention",
            platform=jax.default_backend(),
            capability=dispatch.capability_of(jax.devices()[0]),
            shape=shape,
            dtype=load.DTYPES[config.dtype],
            variant=AttentionVariant(kv_dtype=KV_CACHE_DTYPES.get(config.kv_cache_dtype)),
            wish=config.attention_backend,
        )
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{error}; set --attention-backend") from error
    backend: AttentionBackend = choice.backend
    return backend


def with_tiers(scheduler: SchedulerConfig, pools: Mapping[Tier, AnyPool]) -> SchedulerConfig:
    """The limits, with the blocks that the lower tiers have."""
    num_blocks = {tier: pool.num_blocks for tier, pool in pools.items()}
    return replace(
        scheduler, num_host_blocks=num_blocks.get(Tier.HOST, 0), num_disk_blocks=num_blocks.get(Tier.DISK, 0)
    )


def chosen(
    config: EngineConfig,
    attention_backend: str,
    choice: WeightChoice,
    weights: Sequence[PackedWeight],
    num_blocks: int,
    *,
    weights_cache: str,
) -> str:
    """What was left automatic, as it has been filled in: key=value."""
    choices = {
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_blocks": num_blocks,
        "attention_backend": attention_backend,
        "kv_cache_dtype": config.kv_cache_dtype,
        "weights": choice.layout,
        "weights_reason": f'"{choice.reason}"',
        "weights_packed": f'"{describe(weights)}"',
        "weights_cache": f'"{weights_cache}"',
        "compilation_cache_dir": config.compilation_cache_dir,
    }
    return " ".join(f"{name}={value}" for name, value in choices.items())


def spare_collections() -> None:
    """What is here now stays, so later collections need not walk it; and they come less often, since the scheduler's
    values, a thousand new ones a step, hold no cycles. Together a fifth of a scheduler step at 256 rows."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _silent(phase: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
