"""Steps of Llama-3-8B over a cache in 8 bits: scales, too, are updated in place."""

from collections.abc import Iterable
from functools import partial

import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.ragged_attention import AttentionNeed, AttentionShape, AttentionVariant
from scripts.gpu_gate.attention import MIXED
from scripts.gpu_gate.cases import Case
from scripts.gpu_gate.providers.steps import BLOCK_SIZE, DTYPE, KERNELS, LLAMA_8B, WHOLE, program
from scripts.gpu_gate.target import TARGETS

STEPS = (("step", 512), ("decode", 64))


def cases(target: str) -> Iterable[Case]:
    shape = AttentionShape(LLAMA_8B.num_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim, BLOCK_SIZE)
    for candidate in dispatch.CANDIDATES["ragged_attention"]:
        if candidate.backend.name not in MIXED:
            continue
        for kv_dtype in ("int8", "float8_e4m3fn"):
            variant = AttentionVariant(kv_dtype=kv_dtype)
            need = AttentionNeed("gpu", shape, jnp.dtype(DTYPE), variant, TARGETS[target].capability)
            for key in STEPS:
                what, cache, quick = WHOLE[key]
                yield Case(
                    op="step",
                    backend=candidate.backend.name,
                    target=target,
                    shape=f"Llama-3-8B, {what}, {DTYPE}, cache in {kv_dtype}",
                    build=partial(program, candidate.backend, LLAMA_8B, key, kv_dtype),
                    kernels=KERNELS[key[0]][candidate.backend.name],
                    cache=cache,
                    refused=candidate.refuse(need),
                    quick=quick and kv_dtype == "int8",
                )
