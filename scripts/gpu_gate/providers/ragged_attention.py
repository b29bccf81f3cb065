"""Ragged attention on every shape of its `shapes.py`, a mixed step each."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import dispatch
from pallas_kernels.ragged_attention import AttentionNeed, AttentionShape, KVBlocks, Ragged
from pallas_kernels.ragged_attention.shapes import MODELS
from scripts.gpu_gate.cases import TENSOR_CORES, Case, Program, struct
from scripts.gpu_gate.target import TARGETS

NUM_TOKENS, NUM_ROWS, NUM_BLOCKS, MAX_BLOCKS, NUM_LAYERS = 512, 64, 2048, 256, 4
QUICK = "llama-3.1-8b"
DTYPES = ("bfloat16", "float32")
# Each backend's kernels, and what its half-precision products must use: groups of which one is enough.
KERNELS = {
    "pallas_mosaic": dict.fromkeys(("ragged_attention_mosaic", "paged_attention_mosaic"), (("wgmma",), ("tma",))),
    "pallas_triton": {"ragged_attention": (TENSOR_CORES,)},
}


def cases(target: str) -> Iterable[Case]:
    for candidate in dispatch.CANDIDATES["ragged_attention"]:
        if candidate.backend.name not in KERNELS:
            continue
        for name, shape in MODELS.items():
            for dtype in DTYPES:
                yield Case(
                    op="ragged_attention",
                    backend=candidate.backend.name,
                    target=target,
                    shape=f"{name} {dtype}",
                    build=partial(_program, candidate.backend, shape, dtype),
                    kernels=_kernels(candidate.backend.name, dtype),
                    cache=3,
                    num_layers=NUM_LAYERS,
                    refused=candidate.refuse(
                        AttentionNeed("gpu", shape, jnp.dtype(dtype), capability=TARGETS[target].capability)
                    ),
                    quick=name == QUICK and dtype == "bfloat16",
                )


def _kernels(backend: str, dtype: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """float32 products are exact, so not for tensor cores."""
    return {name: () if dtype == "float32" else needed for name, needed in KERNELS[backend].items()}


def _program(backend: Any, shape: AttentionShape, dtype: str, mesh: Mesh) -> Program:
    heads, kv_heads, head_dim, block_size = shape
    cache = jax.eval_shape(
        lambda: backend.init_cache(NUM_BLOCKS, block_size, kv_heads, head_dim, dtype, num_layers=NUM_LAYERS)
    )
    q, kv = (struct((NUM_TOKENS, n, head_dim), dtype) for n in (heads, kv_heads))
    attend = partial(backend.attend, scale=head_dim**-0.5, layer=1)
    return Program(attend, (q, kv, kv, KVBlocks(*cache), _ragged()), donated=(3,))


def _ragged() -> Ragged:
    rows = struct((NUM_ROWS,), jnp.int32)
    starts, tokens = struct((NUM_ROWS + 1,), jnp.int32), struct((NUM_TOKENS,), jnp.int32)
    return Ragged(struct((NUM_ROWS, MAX_BLOCKS), jnp.int32), starts, rows, tokens, struct((), jnp.int32))
