"""Models of random weights, and the engine around them, without a checkpoint and without text."""

import dataclasses
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.engine.build import choose_attention, with_tiers
from pagedjax.engine.config import KV_CACHE_DTYPES, EngineConfig, claim_memory, resolve
from pagedjax.engine.engine import Engine
from pagedjax.models.config import ModelConfig
from pagedjax.models.llama import LlamaForCausalLM
from pagedjax.runtime import device_memory, kv_cache
from pagedjax.runtime.pools import make_pools
from pagedjax.runtime.runner import Runner
from pagedjax.runtime.swap import max_staging_bytes
from pallas_kernels.ragged_attention import AttentionBackend


class Numbers:
    """A tokenizer of ids that have no text and end nothing."""

    eos_token_ids: frozenset[int] = frozenset()
    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(self.token_text, token_ids))

    def token_text(self, token_id: int) -> str:
        return "."

    def token_bytes(self, token_id: int) -> bytes:
        return b"."


class Made(NamedTuple):
    """An engine, and how long its parts took to make."""

    engine: Engine
    load_s: float
    warm_up_s: float
    num_blocks: int
    activation_bytes: int | None


def random_model(config: ModelConfig, dtype: Any, backend: AttentionBackend, scale: float) -> LlamaForCausalLM:
    """Normal weights of that scale, norms of ones, made on the device leaf by leaf."""
    graph, state = nnx.split(nnx.eval_shape(lambda: LlamaForCausalLM(config, dtype=dtype, backend=backend)))
    leaves, tree = jax.tree.flatten(state)
    make = jax.jit(lambda key, like: scale * jax.random.normal(key, like.shape, like.dtype), static_argnums=1)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [
        jnp.ones(leaf.shape, leaf.dtype) if leaf.ndim == 1 else make(key, _Like(leaf.shape, leaf.dtype))
        for key, leaf in zip(keys, leaves)
    ]
    return nnx.merge(graph, jax.tree.unflatten(tree, made))


class _Like(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


def make_engine(
    model_config: ModelConfig,
    *,
    token_sizes: tuple[int, ...],
    row_sizes: tuple[int, ...] = (16,),
    scale: float = 0.02,
    **options: Any,
) -> Made:
    """As `build_engine` makes one; but of all sizes of steps only `token_sizes` are compiled, and of heads `row_sizes`,
    to save time."""
    share = claim_memory(options.get("gpu_memory_utilization"))
    config = resolve(EngineConfig(model="random", **options), model_config, platform=jax.default_backend())
    dtype, backend = jnp.dtype(config.dtype), choose_attention(config, model_config)
    began = time.perf_counter()
    model = jax.block_until_ready(random_model(model_config, dtype, backend, scale))
    loaded = time.perf_counter()
    cache_dtype = jnp.dtype(KV_CACHE_DTYPES.get(config.kv_cache_dtype, dtype))
    block_bytes = kv_cache.block_bytes(model_config, backend, config.block_size, cache_dtype)
    pools, limits = make_pools(config.runtime, block_bytes), config.scheduler(1)
    runtime = dataclasses.replace(config.runtime, memory_share=share, compilation_cache_dir=None)
    types = {"backend": backend, "dtype": dtype, "cache_dtype": cache_dtype}
    memory = device_memory.measure(model, model_config, limits, runtime, **types)
    spared = max_staging_bytes(limits, block_bytes) if pools else 0
    num_blocks = kv_cache.choose_num_blocks(runtime, limits, block_bytes, spared_bytes=spared, device=memory)
    scheduler = with_tiers(config.scheduler(num_blocks), pools)
    runner = Runner(model, model_config, scheduler, runtime, pools=pools, **types)
    runner.shapes = dataclasses.replace(runner.shapes, token_sizes=token_sizes, row_sizes=row_sizes)
    runner.warm_up()
    warm_s = time.perf_counter() - loaded
    engine = Engine(config, scheduler, runner, Numbers(model_config.vocab_size))  # type: ignore[arg-type]
    return Made(engine, loaded - began, warm_s, num_blocks, None if memory is None else memory.activations)
