"""Block copy over the caches of eight layers, plain and quantised: in place where it writes them."""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.block_copy import backend_for, staging_for
from pallas_kernels.kv_blocks import init_blocks
from scripts.gpu_gate.cases import Case, Program, struct

NUM_LAYERS, NUM_BLOCKS, NUM_COPIED = 8, 2048, 64


def cases(target: str) -> Iterable[Case]:
    backend = backend_for("gpu")
    for dtype in ("bfloat16", "int8"):
        for part in ("gather", "scatter", "copy"):
            yield Case(
                op="block_copy",
                backend=backend.name,
                target=target,
                shape=f"{part} {NUM_COPIED} blocks of {NUM_LAYERS} layers, {dtype}",
                build=partial(_program, part, dtype),
                kernels={"block_copy": ()},
                cache=None if part == "gather" else 0,
                quick=part == "scatter",
            )


def _program(part: str, dtype: str, mesh: Mesh) -> Program:
    caches = jax.eval_shape(lambda: tuple(init_blocks(NUM_BLOCKS, 16, 8, 128, dtype) for _ in range(NUM_LAYERS)))
    ids = struct((NUM_COPIED,), jnp.int32)
    more = {"gather": (ids,), "scatter": (staging_for(caches, NUM_COPIED), ids), "copy": (ids, ids)}
    donated = () if part == "gather" else (0,)
    return Program(getattr(backend_for("gpu"), part), (caches, *more[part]), donated=donated)
