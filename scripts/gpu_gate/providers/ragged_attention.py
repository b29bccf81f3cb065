"""Ragged attention on every shape and variant of its `shapes.py`, a mixed step each."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import dispatch
from pallas_kernels.ragged_attention import AttentionNeed, AttentionShape, AttentionVariant, KVBlocks, Ragged
from pallas_kernels.ragged_attention.shapes import MODELS, VARIED
from scripts.gpu_gate.attention import MIXED
from scripts.gpu_gate.cases import Case, Program, struct
from scripts.gpu_gate.target import TARGETS

NUM_TOKENS, NUM_ROWS, NUM_BLOCKS, MAX_BLOCKS, NUM_LAYERS = 512, 64, 2048, 256, 4
QUICK = "llama-3.1-8b"
DTYPES = ("bfloat16", "float32")


def cases(target: str) -> Iterable[Case]:
    for candidate in dispatch.CANDIDATES["ragged_attention"]:
        if candidate.backend.name not in MIXED:
            continue
        plain = {(name, x): (shape, x, AttentionVariant()) for name, shape in MODELS.items() for x in DTYPES}
        varied = {(name, what[1]): what for name, what in VARIED.items()}
        for (name, dtype), (shape, _, variant) in (plain | varied).items():
            yield Case(
                op="ragged_attention",
                backend=candidate.backend.name,
                target=target,
                shape=f"{name} {dtype}",
                build=partial(_program, candidate.backend, shape, dtype, variant),
                kernels=MIXED[candidate.backend.name],
                cache=3,
                num_layers=NUM_LAYERS,
                refused=candidate.refuse(
                    AttentionNeed("gpu", shape, jnp.dtype(dtype), variant, TARGETS[target].capability)
                ),
                quick=name == QUICK and dtype == "bfloat16",
            )


def _program(backend: Any, shape: AttentionShape, dtype: str, variant: AttentionVariant, mesh: Mesh) -> Program:
    heads, kv_heads, head_dim, block_size = shape
    kept = variant.kv_dtype or dtype
    cache = jax.eval_shape(
        lambda: backend.init_cache(NUM_BLOCKS, block_size, kv_heads, head_dim, kept, num_layers=NUM_LAYERS)
    )
    q, kv = (struct((NUM_TOKENS, n, head_dim), dtype) for n in (heads, kv_heads))
    options = {"window": 128 if variant.window else None, "softcap": 30.0 if variant.softcap else None}
    attend = partial(_attend, backend, scale=head_dim**-0.5, layer=1, **options)
    sinks = (struct((heads,), jnp.float32),) if variant.sinks else ()
    return Program(attend, (q, kv, kv, KVBlocks(*cache), _ragged(), *sinks), donated=(3,))


def _attend(backend: Any, *arguments: Any, **options: Any) -> Any:
    """Sinks, where there are some, come last."""
    return backend.attend(*arguments[:5], sinks=arguments[5] if len(arguments) > 5 else None, **options)


def _ragged() -> Ragged:
    rows = struct((NUM_ROWS,), jnp.int32)
    starts, tokens = struct((NUM_ROWS + 1,), jnp.int32), struct((NUM_TOKENS,), jnp.int32)
    return Ragged(struct((NUM_ROWS, MAX_BLOCKS), jnp.int32), starts, rows, tokens, struct((), jnp.int32))
