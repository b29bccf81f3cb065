"""Steps of Llama-3-8B with AWQ's weights: in a decode a kernel reads them as they are, in a prefill XLA dequantises."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from pagedjax.core.config import SchedulerConfig
from pagedjax.runtime import abstract
from pallas_kernels.attention import AttentionNeed, AttentionShape
from pallas_kernels.matmul import FloatWeight
from pallas_kernels.quant_matmul import Int4Weight
from pallas_kernels.ragged_attention import pallas_triton
from pallas_kernels.triton import refuse
from scripts.gpu_gate.attention import DECODES, MIXED
from scripts.gpu_gate.cases import TENSOR_CORES, Case, Program, struct
from scripts.gpu_gate.providers.steps import BLOCK_SIZE, DTYPE, LLAMA_8B, NUM_BLOCKS
from scripts.gpu_gate.target import TARGETS

GROUP_SIZE = 128
MAX_TOKENS = 512


def cases(target: str) -> Iterable[Case]:
    shape = AttentionShape(LLAMA_8B.num_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim, BLOCK_SIZE)
    products = {"quant_matmul": (TENSOR_CORES,)}
    programs = {
        ("decode", 64): ("decode of 64 rows", {**DECODES["pallas_triton"], **products}),
        ("step", MAX_TOKENS): ("prefill of 512 tokens", MIXED["pallas_triton"]),
    }
    for key, (what, kernels) in programs.items():
        yield Case(
            op="step",
            backend="pallas_triton",
            target=target,
            shape=f"Llama-3-8B in AWQ, {what}, {DTYPE}",
            build=lambda mesh, key=key: _program(key, target, mesh),
            kernels=kernels,
            cache=1,
            refused=refuse(AttentionNeed("gpu", shape, jnp.dtype(DTYPE), capability=TARGETS[target].capability)),
        )


def _program(key: tuple[str, int], target: str, mesh: Mesh) -> Program:
    scheduler = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS[1],
        max_num_seqs=64,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=LLAMA_8B.max_position_embeddings,
    )

    def in_awq(model: nnx.Module) -> nnx.Module:
        graph, state = nnx.split(model)
        relaid = [(path, var.replace(_relaid(path, var.get_value(), target))) for path, var in nnx.to_flat_state(state)]
        return nnx.merge(graph, nnx.from_flat_state(relaid))

    jobs = abstract.jobs(LLAMA_8B, scheduler, backend=pallas_triton.BACKEND, dtype=DTYPE, relayed=in_awq)
    job = next(job for job in jobs if (job.name, job.size) == key)
    return Program(job.jitted, job.inputs)


def _relaid(path: tuple[Any, ...], value: Any, target: str) -> Any:
    """AWQ leaves embeddings and head as they are."""
    if not isinstance(value, FloatWeight) or "layers" not in path:
        return value
    num_out, num_in = value.w.shape
    groups = (num_in // GROUP_SIZE, num_out)
    quants, zeros = struct((num_in // 2, num_out), jnp.uint8), struct(groups, jnp.uint8)
    scales = struct(groups, jnp.float16)
    return Int4Weight(quants, scales, zeros, None, platform="gpu", capability=TARGETS[target].capability)
