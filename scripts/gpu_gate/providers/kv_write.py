"""KV write on every shape of its `shapes.py`, and block copy of a whole model's caches, plain and quantised."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import dispatch
from pallas_kernels.attention import AttentionNeed, AttentionShape, AttentionVariant
from pallas_kernels.block_copy import backend_for, staging_for
from pallas_kernels.kv_blocks import KVBlocks, init_blocks
from pallas_kernels.kv_write.shapes import SHAPES
from scripts.gpu_gate.cases import Case, Program, struct
from scripts.gpu_gate.target import TARGETS

NUM_LAYERS, NUM_BLOCKS, NUM_COPIED = 8, 2048, 64


def cases(target: str) -> Iterable[Case]:
    for candidate in dispatch.CANDIDATES["kv_write"]:
        if candidate.backend.name == "pallas_triton":
            for shape in SHAPES:
                yield _write_case(candidate, shape, target)
    for dtype in ("bfloat16", "int8"):
        for part in ("gather", "scatter", "copy"):
            yield Case(
                op="block_copy",
                backend=backend_for("gpu").name,
                target=target,
                shape=f"{part} {NUM_COPIED} blocks of {NUM_LAYERS} layers {dtype}",
                build=partial(_copy_program, part, dtype),
                kernels={"block_copy": ()},
                cache=None if part == "gather" else 0,
            )


def _write_case(candidate: Any, shape: Any, target: str) -> Case:
    num_tokens, kv_heads, head_dim, block_size, kv_dtype = shape
    model = AttentionShape(kv_heads, kv_heads, head_dim, block_size)
    need = AttentionNeed(
        "gpu", model, jnp.dtype("bfloat16"), AttentionVariant(kv_dtype=kv_dtype), TARGETS[target].capability
    )
    return Case(
        op="kv_write",
        backend=candidate.backend.name,
        target=target,
        shape=f"{num_tokens} tokens, {kv_heads} x {head_dim}, blocks of {block_size}, {kv_dtype or 'bfloat16'}",
        build=partial(_write_program, candidate.backend, shape),
        kernels={"kv_write": ()},
        cache=2,
        num_layers=2,
        refused=candidate.refuse(need),
        quick=kv_dtype == "int8",
    )


def _write_program(backend: Any, shape: Any, mesh: Mesh) -> Program:
    num_tokens, kv_heads, head_dim, block_size, kv_dtype = shape
    cache = jax.eval_shape(
        lambda: init_blocks(NUM_BLOCKS, block_size, kv_heads, head_dim, kv_dtype or "bfloat16", num_layers=2)
    )
    kv = struct((num_tokens, kv_heads, head_dim), jnp.bfloat16)
    arguments = (kv, kv, KVBlocks(*cache), struct((num_tokens,), jnp.int32))
    return Program(partial(backend.write, layer=1), arguments, donated=(2,))


def _copy_program(part: str, dtype: str, mesh: Mesh) -> Program:
    caches = jax.eval_shape(lambda: tuple(init_blocks(NUM_BLOCKS, 16, 8, 128, dtype) for _ in range(NUM_LAYERS)))
    ids = struct((NUM_COPIED,), jnp.int32)
    more = {"gather": (ids,), "scatter": (staging_for(caches, NUM_COPIED), ids), "copy": (ids, ids)}
    donated = () if part == "gather" else (0,)
    return Program(getattr(backend_for("gpu"), part), (caches, *more[part]), donated=donated)
