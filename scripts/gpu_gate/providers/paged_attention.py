"""Paged attention on every batch of its `shapes.py`, split over the context where the batch is."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import dispatch
from pallas_kernels.attention import AttentionNeed, AttentionVariant
from pallas_kernels.kv_blocks import KVBlocks, init_blocks
from pallas_kernels.paged_attention.shapes import SHAPES, DecodeShape
from scripts.gpu_gate.cases import TENSOR_CORES, Case, Program, struct
from scripts.gpu_gate.target import TARGETS

QUICK = ("8b-64x4k", "8b-64x4k-int8")
SPLIT = {"paged_attention_pieces": (TENSOR_CORES,), "paged_attention_combine": ()}
WHOLE = {"paged_attention": (TENSOR_CORES,)}
SHORT = ("short-128x256",)


def cases(target: str) -> Iterable[Case]:
    for candidate in dispatch.CANDIDATES["paged_attention"]:
        if candidate.backend.name != "pallas_triton":
            continue
        for name, shape in SHAPES.items():
            variant = AttentionVariant(kv_dtype=shape.kv_dtype)
            capability = TARGETS[target].capability
            need = AttentionNeed("gpu", shape.model, jnp.dtype(shape.dtype), variant, capability)
            yield Case(
                op="paged_attention",
                backend=candidate.backend.name,
                target=target,
                shape=f"{name} {shape.dtype}",
                build=partial(_program, candidate.backend, shape),
                kernels=WHOLE if name in SHORT else SPLIT,
                refused=candidate.refuse(need),
                quick=name in QUICK,
            )


def _program(backend: Any, shape: DecodeShape, mesh: Mesh) -> Program:
    heads, kv_heads, head_dim, block_size = shape.model
    cache = jax.eval_shape(
        lambda: init_blocks(4096, block_size, kv_heads, head_dim, shape.kv_dtype or shape.dtype, num_layers=2)
    )
    tables = struct((shape.rows, shape.max_len // block_size), jnp.int32)
    arguments = (
        struct((shape.rows, heads, head_dim), shape.dtype),
        KVBlocks(*cache),
        tables,
        struct((shape.rows,), jnp.int32),
    )
    return Program(partial(backend.attend, scale=head_dim**-0.5, layer=1), arguments)
