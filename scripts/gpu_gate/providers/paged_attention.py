"""Paged attention on every shape of its `shapes.py`."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import dispatch
from pallas_kernels.attention import AttentionNeed, AttentionVariant
from pallas_kernels.kv_blocks import init_blocks
from pallas_kernels.paged_attention.shapes import SHAPES, DecodeShape
from scripts.gpu_gate.attention import DECODE, SPLIT_DECODE
from scripts.gpu_gate.cases import Case, Program, struct
from scripts.gpu_gate.target import TARGETS

QUICK = "8b-64x4k"
NUM_BLOCKS = 4096


def cases(target: str) -> Iterable[Case]:
    for candidate in dispatch.CANDIDATES["paged_attention"]:
        name = candidate.backend.name
        if name not in DECODE:
            continue
        for label, shape in SHAPES.items():
            variant = AttentionVariant(kv_dtype=shape.kv_dtype)
            need = AttentionNeed("gpu", shape.model, jnp.dtype(shape.dtype), variant, TARGETS[target].capability)
            yield Case(
                op="paged_attention",
                backend=name,
                target=target,
                shape=f"{label} {shape.dtype}",
                build=partial(_program, candidate.backend, shape, target),
                kernels=(DECODE if shape.max_len <= 512 else SPLIT_DECODE)[name],
                refused=candidate.refuse(need),
                quick=label == QUICK,
            )


def _program(backend: Any, shape: DecodeShape, target: str, mesh: Mesh) -> Program:
    heads, kv_heads, head_dim, block_size = shape.model
    kept = shape.kv_dtype or shape.dtype
    cache = jax.eval_shape(lambda: init_blocks(NUM_BLOCKS, block_size, kv_heads, head_dim, kept, num_layers=2))
    tables = struct((shape.rows, shape.max_len // block_size), jnp.int32)
    options: dict[str, Any] = {"scale": head_dim**-0.5, "layer": 1}
    if backend.name == "jax_triton":
        major, minor = TARGETS[target].capability
        options["compute_capability"] = 10 * major + minor
    q, lens = struct((shape.rows, heads, head_dim), shape.dtype), struct((shape.rows,), jnp.int32)
    return Program(partial(backend.attend, **options), (q, cache, tables, lens))
