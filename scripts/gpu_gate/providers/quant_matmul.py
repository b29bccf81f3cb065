"""Products with 4-bit weights: every shape of its `shapes.py` by every number of tokens that a kernel takes."""

from collections.abc import Iterable
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.quant_matmul import Int4Weight, QuantBackend, QuantNeed
from pallas_kernels.quant_matmul.choice import CANDIDATES
from pallas_kernels.quant_matmul.shapes import MODELS, TOKENS, QuantShape
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
                    build=partial(_program, candidate.backend, shape, num_tokens),
                    kernels={"quant_matmul": (TENSOR_CORES,)},
                    refused=candidate.refuse(need),
                    quick=name == QUICK and num_tokens in (1, 64),
                )


def _program(backend: QuantBackend, shape: QuantShape, num_tokens: int, mesh: Mesh) -> Program:
    groups = (shape.num_in // shape.group_size, shape.num_out)
    weight = Int4Weight(
        struct((shape.num_in // 2, shape.num_out), jnp.uint8),
        struct(groups, jnp.float16),
        struct(groups, jnp.uint8),
        None,
        platform="gpu",
    )
    return Program(backend.multiply, (struct((num_tokens, shape.num_in), jnp.bfloat16), weight))
