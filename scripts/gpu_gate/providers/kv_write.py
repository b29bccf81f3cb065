"""Writing keys and values on every shape of its `shapes.py`: in place, whatever is kept."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import dispatch
from pallas_kernels.attention import AttentionNeed, AttentionShape, AttentionVariant
from pallas_kernels.kv_blocks import init_blocks
from pallas_kernels.kv_write.shapes import SHAPES
from scripts.gpu_gate.cases import Case, Program, struct
from scripts.gpu_gate.target import TARGETS

# Backend -> kernels. The scatter that XLA makes is none, but must be in place as well.
KERNELS: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {"pallas_triton": {"kv_write": ()}, "xla": {}}
NUM_BLOCKS, NUM_LAYERS = 4096, 2
DTYPE = "bfloat16"


def cases(target: str) -> Iterable[Case]:
    for candidate in dispatch.CANDIDATES["kv_write"]:
        name = candidate.backend.name
        if name not in KERNELS:
            continue
        for shape in SHAPES:
            num_tokens, kv_heads, head_dim, block_size, kv_dtype = shape
            model = AttentionShape(kv_heads, kv_heads, head_dim, block_size)
            variant = AttentionVariant(kv_dtype=kv_dtype)
            need = AttentionNeed("gpu", model, jnp.dtype(DTYPE), variant, TARGETS[target].capability)
            label = f"{num_tokens} tokens, {kv_heads} heads of {head_dim}, blocks of {block_size}, {kv_dtype or DTYPE}"
            yield Case(
                op="kv_write",
                backend=name,
                target=target,
                shape=label,
                build=partial(_program, candidate.backend, num_tokens, model, kv_dtype or DTYPE),
                kernels=KERNELS[name],
                cache=2,
                num_layers=NUM_LAYERS,
                refused=candidate.refuse(need),
                quick=num_tokens == 64,
            )


def _program(backend: Any, num_tokens: int, model: AttentionShape, kept: str, mesh: Mesh) -> Program:
    _, kv_heads, head_dim, block_size = model
    cache = jax.eval_shape(lambda: init_blocks(NUM_BLOCKS, block_size, kv_heads, head_dim, kept, num_layers=NUM_LAYERS))
    values, slots = struct((num_tokens, kv_heads, head_dim), DTYPE), struct((num_tokens,), jnp.int32)
    return Program(partial(backend.write, layer=1), (values, values, cache, slots), donated=(2,))
