"""Products with 4-bit weights: every shape of its `shapes.py` by every number of tokens that a kernel takes."""

from collections.abc import Iterable
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.quant_matmul import Int4Weight, QuantBackend, QuantNeed
from pallas_kernels.quant_matmul.choice import CANDIDATES
from pallas_kernels.quant_matmul.shapes import MODELS, TOKENS
from scripts.gpu_gate.cases import TENSOR_CORES, Case, Program, struct
from scripts.gpu_gate.target import TARGETS

QUICK = "llama-3.1-8b down"
BACKENDS = ("pallas_triton", "jax_triton")


def cases(target: str) -> Iterable[Case]:
    dtype = jnp.dtype("bfloat16")
    for candidate in CANDIDATES:
        if candidate.backend.name not in BACKENDS:
            continue
        for name, shape in MODELS.items():
            for num_tokens in TOKENS:
                need = QuantNeed("gpu", num_tokens, *shape, dtype, TARGETS[target].capability)
                yield Case(
                    op="quant_matmul",
                    backend=candidate.backend.name,
                    target=target,
                    shape=f"{name}, tokens: {num_tokens}, bfloat16",
                    build=partial(_program, candidate.backend, need),
                    kernels={"quant_matmul": (TENSOR_CORES,)},
                    refused=candidate.refuse(need),
                    quick=name == QUICK and num_tokens in (1, 64),
                )


def _program(backend: QuantBackend, need: QuantNeed, mesh: Mesh) -> Program:
    groups = (need.num_in // need.group_size, need.num_out)
    weight = Int4Weight(
        struct((need.num_in // 2, need.num_out), jnp.uint8),
        struct(groups, jnp.float16),
        struct(groups, jnp.uint8),
        None,
        platform=need.platform,
        capability=need.capability,
    )
    return Program(backend.multiply, (struct((need.num_tokens, need.num_in), need.dtype), weight))
