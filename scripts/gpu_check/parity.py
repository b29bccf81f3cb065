"""(a) Every kernel and backend against its op's reference, in float32 on the same device."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import block_copy, dispatch, quant_matmul
from pallas_kernels.kv_blocks import KVBlocks
from pallas_kernels.quant_matmul import reference as quant_reference
from pallas_kernels.quant_matmul.choice import CANDIDATES as QUANT_CANDIDATES
from pallas_kernels.ragged_attention import AttentionBackend, AttentionNeed, AttentionShape, AttentionVariant, reference
from scripts.gpu_check import batches
from scripts.gpu_check.checks import Check, Figures, Refused
from scripts.gpu_check.device import capability, platform

# Of the largest output; the reference sums in float32.
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
# (query tokens, cached tokens): block edges, a decode of one token, one long among many short ones.
MIXED = [(1, 1), (1, 16), (1, 17), (1, 900), (1, 64), (5, 5), (16, 48), (33, 300)]
DECODES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 33), (1, 1500), (1, 2)]
TINY_MIXED, TINY_DECODES = [(1, 1), (1, 17), (4, 4), (5, 20)], [(1, 1), (1, 8), (1, 19)]
PLAIN = AttentionVariant()


class Case(NamedTuple):
    """A shape in a type, what it adds, and whether all rows are decodes."""

    words: str
    shape: AttentionShape
    dtype: str
    variant: AttentionVariant = PLAIN
    is_decode: bool = False


_8B, _SMOL = AttentionShape(32, 8, 128, 16), AttentionShape(9, 3, 64, 16)
CASES = (
    Case("8B", _8B, "bfloat16"),
    Case("8B decodes", _8B, "bfloat16", is_decode=True),
    Case("SmolLM2", _SMOL, "float32"),
    Case("SmolLM2 decodes", _SMOL, "float32", is_decode=True),
    Case("8B window", _8B, "bfloat16", AttentionVariant(window=True)),
    Case("8B soft-cap and sinks", _8B, "bfloat16", AttentionVariant(softcap=True, sinks=True)),
    Case("8B int8 cache", _8B, "bfloat16", AttentionVariant(kv_dtype="int8")),
    Case("8B fp8 cache decodes", _8B, "bfloat16", AttentionVariant(kv_dtype="float8_e4m3fn"), True),
    Case("group of 16, blocks of 32", AttentionShape(16, 1, 128, 32), "float16"),
    Case("head_dim 80, blocks of 8", AttentionShape(8, 8, 80, 8), "bfloat16"),
    Case("head_dim 256, blocks of 64", AttentionShape(8, 4, 256, 64), "bfloat16"),
)
TINY = AttentionShape(4, 2, 16, 8)
TINY_CASES = (
    Case("tiny", TINY, "float32"),
    Case("tiny decodes", TINY, "bfloat16", is_decode=True),
    Case("tiny int8 cache", TINY, "float32", AttentionVariant(kv_dtype="int8")),
)


def checks(*, stand_in: bool) -> Iterator[Check]:
    cases = TINY_CASES if stand_in else CASES
    for op, candidates in dispatch.CANDIDATES.items():
        check = {"ragged_attention": ragged, "paged_attention": paged, "kv_write": kv_write}.get(op, _unknown)
        # Triton's before Mosaic's: what is simpler tells whether the rest of the check can be trusted.
        for candidate in sorted(candidates, key=lambda one: "mosaic" in one.backend.name):
            if _is_worth_it(candidate, stand_in):
                for case in filter(_SUITS.get(op, lambda case: True), cases):
                    yield Check(f"{op} {candidate.backend.name} {case.words}", partial(check, candidate, case), 60.0)
    yield Check("block_copy", partial(copies, stand_in), 60.0)
    for candidate in QUANT_CANDIDATES:
        if candidate.only_when_wished == stand_in and candidate.backend is not quant_reference.BACKEND:
            for num_tokens in (5,) if stand_in else (1, 16, 64, 2048):
                name = f"quant_matmul {candidate.backend.name} of {num_tokens} tokens"
                yield Check(name, partial(quantised, candidate, num_tokens, stand_in), 60.0)


# What is read by decodes alone; what is written is the same whoever reads it, and how.
_SUITS: dict[str, Callable[[Case], bool]] = {
    "paged_attention": lambda case: case.is_decode,
    "kv_write": lambda case: not case.is_decode and case.variant == AttentionVariant(kv_dtype=case.variant.kv_dtype),
}


def _is_worth_it(candidate: Any, stand_in: bool) -> bool:
    """Compiled kernels on a GPU; interpreted ones and XLA's on a CPU. The reference itself is what they are held to."""
    name = candidate.backend.name
    return name != "reference" and "mosaic" not in name * stand_in and (stand_in or "interpret" not in name)


def _need(candidate: Any, case: Case) -> None:
    need = AttentionNeed(platform(), case.shape, jnp.dtype(case.dtype), case.variant, capability())
    reason = candidate.refuse(need)
    if reason is not None:
        raise Refused(reason)


def _options(case: Case) -> dict[str, Any]:
    variant = case.variant
    return {
        "scale": case.shape.head_dim**-0.5,
        "window": 20 if variant.window else None,
        "softcap": 5.0 if variant.softcap else None,
        "sinks": jnp.linspace(-1.0, 1.0, case.shape.num_heads) if variant.sinks else None,
    }


@cache
def _batch(case: Case) -> batches.Batch:
    tiny = case.shape == TINY
    rows = (TINY_DECODES if tiny else DECODES) if case.is_decode else (TINY_MIXED if tiny else MIXED)
    return batches.make(case.shape, rows, case.dtype, kv_dtype=case.variant.kv_dtype, num_padding=0)


def ragged(candidate: Any, case: Case) -> Figures:
    _need(candidate, case)
    batch, options = _batch(case), _options(case)
    cache = laid_out(candidate.backend, batch.cache, case)
    attend = jax.jit(partial(candidate.backend.attend, max_q_len=1 if case.is_decode else None, **options))
    out, _ = attend(batch.q, batch.k, batch.v, cache, batch.ragged)
    return _compared(out, _expected(case)[0], case.dtype)


def paged(candidate: Any, case: Case) -> Figures:
    _need(candidate, case)
    batch, options = _batch(case), _options(case)
    expected, written = _expected(case)
    attend = jax.jit(partial(candidate.backend.attend, **options))
    out = attend(batch.q, _in_type(written, batch.cache), batch.ragged.block_tables, batch.ragged.kv_lens)
    return _compared(out, expected, case.dtype)


def kv_write(candidate: Any, case: Case) -> Figures:
    _need(candidate, case)
    batch = _batch(case)
    found = jax.jit(candidate.backend.write)(batch.k, batch.v, batch.cache, batch.ragged.slots)
    _, expected = _expected(case)
    for name, mine, theirs in zip(KVBlocks._fields, found, expected):
        if mine is not None:
            a, b = (np.asarray(x.astype(jnp.float32)) for x in (mine, theirs))
            # A scale may differ in its last bit, and so may what is divided by it.
            near = np.abs(a - b) <= (1.0 if a.dtype == np.int8 else 1e-2) * np.maximum(np.abs(b), 1e-6)
            assert (near | (np.isnan(a) & np.isnan(b))).all(), f"{name} differs"
    return {}


def _unknown(candidate: Any, case: Case) -> Figures:
    raise Refused("this check does not know the op")


@cache
def _expected(case: Case) -> tuple[jax.Array, KVBlocks]:
    """The reference's output in float32, and its cache."""
    batch, options = _batch(case), _options(case)
    if batch.cache.k_scale is None:
        wide = [x.astype(jnp.float32) for x in (batch.q, batch.k, batch.v)]
        cache = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), batch.cache)
    else:
        wide, cache = [batch.q.astype(jnp.float32), batch.k, batch.v], batch.cache
    return jax.jit(partial(reference.attend, **options))(*wide, cache, batch.ragged)


def _in_type(cache: KVBlocks, like: KVBlocks) -> KVBlocks:
    return jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), cache, like)


def laid_out(backend: AttentionBackend, cache: KVBlocks, case: Case) -> KVBlocks:
    """A cache as the backend keeps it. XLA's has a block's tokens before its heads, and halves as bits."""
    shape = case.shape
    kept = jax.eval_shape(
        lambda: backend.init_cache(
            cache.k.shape[0], shape.block_size, shape.num_kv_heads, shape.head_dim, case.variant.kv_dtype or case.dtype
        )
    )
    if kept.k.shape == cache.k.shape:
        return cache
    if backend.name != "xla":
        raise Refused("its cache is laid out in a way of its own, which its tests know")
    turned = [None if leaf is None else jnp.swapaxes(leaf, 2, 3) for leaf in cache]
    return KVBlocks(
        *(
            None if leaf is None else jax.lax.bitcast_convert_type(leaf, like.dtype).reshape(like.shape)
            for leaf, like in zip(turned, kept)
        )
    )


def _compared(found: jax.Array, expected: jax.Array, dtype: str) -> Figures:
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (found, expected))
    assert np.isfinite(a).all(), f"{(~np.isfinite(a)).sum()} of {a.size} outputs are no numbers"
    error = float(np.abs(a - b).max() / np.abs(b).max())
    assert error <= LIMITS[dtype], f"error {error:.2e}, more than {LIMITS[dtype]:.0e}"
    return {"error": error}


def copies(stand_in: bool) -> Figures:
    """Blocks out, back to other places and between blocks, bit for bit."""
    rng, num_blocks, size = np.random.default_rng(0), 16 if stand_in else 512, 4 if stand_in else 64
    # JAX 0.10 on CPUs keeps no NaN's payload: an exponent without its highest bit makes none.
    bits = np.uint16(0xBFFF if stand_in else 0xFFFF)
    values = [rng.integers(0, 2**16, (num_blocks, 1, 2, 8, 64), np.uint16) & bits for _ in range(4)]
    caches = [jnp.asarray(x).view(jnp.bfloat16) for x in values]
    backend = block_copy.backend_for(platform())
    ids = jnp.asarray(rng.permutation(num_blocks)[:size], jnp.int32)
    staging = jax.jit(backend.gather)(caches, ids)
    back = jax.jit(backend.scatter)([jnp.zeros_like(x) for x in caches], staging, ids)
    within = jax.jit(backend.copy)(caches, ids[: size // 2], ids[size // 2 :])
    for value, put, moved in zip(values, back, within):
        chosen = np.asarray(ids)
        np.testing.assert_array_equal(np.asarray(put.view(jnp.uint16))[chosen], value[chosen])
        kept = np.asarray(moved.view(jnp.uint16))
        np.testing.assert_array_equal(kept[chosen[size // 2 :]], value[chosen[: size // 2]])
    return {}


def quantised(candidate: Any, num_tokens: int, stand_in: bool) -> Figures:
    num_in, num_out, group = (256, 64, 64) if stand_in else (4096, 6144, 128)
    dtype = "bfloat16"
    need = quant_matmul.QuantNeed(platform(), num_tokens, num_in, num_out, group, jnp.dtype(dtype), capability())
    reason = candidate.refuse(need)
    if reason is not None:
        raise Refused(reason)
    rng = np.random.default_rng(0)
    weight = quant_matmul.Int4Weight(
        jnp.asarray(rng.integers(0, 256, (num_in // 2, num_out), np.uint8)),
        jnp.asarray(rng.uniform(0.001, 0.01, (num_in // group, num_out)), jnp.dtype(dtype)),
        jnp.asarray(rng.integers(0, 16, (num_in // group, num_out), np.uint8)),
        None,
        platform(),
        capability(),
    )
    x = jax.random.normal(jax.random.key(0), (num_tokens, num_in), jnp.dtype(dtype))
    wide = dataclasses.replace(weight, scales=weight.scales.astype(jnp.float32))
    expected = jax.jit(quant_reference.multiply)(x.astype(jnp.float32), wide)
    return _compared(jax.jit(candidate.backend.multiply)(x, weight), expected, dtype)
