"""(b) How fast the kernels are, beside what the device's memory and tensor cores were measured to give."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, quant_matmul
from pallas_kernels.quant_matmul.choice import CANDIDATES as QUANT_CANDIDATES
from pallas_kernels.ragged_attention import AttentionNeed, AttentionShape, AttentionVariant
from scripts.gpu_check import batches
from scripts.gpu_check.checks import Check, Figures, Refused, Skipped
from scripts.gpu_check.device import capability, platform
from scripts.gpu_check.parity import Case, laid_out
from scripts.gpu_check.shapes import DECODE, PREFILL, TINY_DECODE, TINY_PREFILL
from scripts.gpu_check.timing import per_call_s


def checks(*, stand_in: bool) -> Iterator[Check]:
    yield Check("copy bandwidth", partial(copy_bandwidth, stand_in))
    yield Check("matmul rate", partial(matmul_rate, stand_in))
    for candidate in dispatch.CANDIDATES["ragged_attention"]:
        name = candidate.backend.name
        # XLA's loops wait for the host at every turn: nobody chooses them on a GPU, and they would take all the time.
        if ("interpret" in name) != stand_in or not ("triton" in name or "mosaic" in name):
            continue
        for name, (shape, rows, dtype, kv) in (TINY_DECODE if stand_in else DECODE).items():
            case = Case(name, AttentionShape(*shape), dtype, AttentionVariant(kv_dtype=kv), True)
            yield Check(
                f"decode {candidate.backend.name} {name}", partial(decode, candidate, case, rows, stand_in), 60.0
            )
        for name, (shape, rows, dtype) in (TINY_PREFILL if stand_in else PREFILL).items():
            case = Case(name, AttentionShape(*shape), dtype)
            yield Check(
                f"prefill {candidate.backend.name} {name}", partial(prefill, candidate, case, rows, stand_in), 60.0
            )
    for name, (shape, rows, dtype, kv) in (TINY_DECODE if stand_in else DECODE).items():
        if kv is None:
            yield Check(
                f"decode jax's own paged_attention {name}",
                partial(jax_own, AttentionShape(*shape), rows, dtype, stand_in),
                60.0,
            )
    for candidate in QUANT_CANDIDATES:
        if candidate.only_when_wished == stand_in:
            yield Check(f"quant_matmul {candidate.backend.name}", partial(quantised, candidate, stand_in), 60.0)


@cache
def _copy_bytes_per_s(stand_in: bool) -> float:
    num_bytes = 2**16 if stand_in else 4 * 2**30
    step = jax.jit(lambda x: x + jnp.bfloat16(1), donate_argnums=0)
    taken_s = per_call_s(step, jnp.zeros(num_bytes // 2, jnp.bfloat16), least_s=_least_s(stand_in))
    return 2 * num_bytes / taken_s


@cache
def _matmul_flops_per_s(stand_in: bool) -> float:
    size = 64 if stand_in else 8192
    weight = jnp.eye(size, dtype=jnp.bfloat16)
    step = jax.jit(lambda x: x @ weight)
    return 2 * size**3 / per_call_s(step, jnp.ones((size, size), jnp.bfloat16), least_s=_least_s(stand_in))


def _least_s(stand_in: bool) -> float:
    return 0.001 if stand_in else 0.05


def copy_bandwidth(stand_in: bool) -> Figures:
    return {"TB/s": _copy_bytes_per_s(stand_in) / 1e12}


def matmul_rate(stand_in: bool) -> Figures:
    return {"TFLOP/s": _matmul_flops_per_s(stand_in) / 1e12}


def _attention_s(candidate: Any, case: Case, rows: list[tuple[int, int]], stand_in: bool) -> tuple[float, Any]:
    """Seconds a call, the writing of the new keys and values included, and the batch."""
    need = AttentionNeed(platform(), case.shape, jnp.dtype(case.dtype), case.variant, capability())
    reason = candidate.refuse(need)
    if reason is not None:
        raise Refused(reason)
    batch = batches.make(case.shape, rows, case.dtype, kv_dtype=case.variant.kv_dtype, num_padding=0)
    max_q_len = 1 if case.is_decode else None
    attend = partial(candidate.backend.attend, scale=case.shape.head_dim**-0.5, max_q_len=max_q_len)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Any, state: Any) -> Any:
        out, kept = attend(q, k, v, state[1], ragged)
        return out, kept

    jitted = jax.jit(run, donate_argnums=4)
    state = (jnp.zeros_like(batch.q), laid_out(candidate.backend, batch.cache, case))
    step = partial(jitted, batch.q, batch.k, batch.v, batch.ragged)
    return per_call_s(step, state, least_s=_least_s(stand_in)), batch


def decode(candidate: Any, case: Case, rows: list[tuple[int, int]], stand_in: bool) -> Figures:
    taken_s, batch = _attention_s(candidate, case, rows, stand_in)
    per_token = sum(leaf.size * leaf.dtype.itemsize for leaf in batch.cache if leaf is not None) / (
        batch.cache.k.shape[0] * case.shape.block_size
    )
    bytes_per_s = sum(kv_len for _, kv_len in rows) * per_token / taken_s
    return _bandwidth(taken_s, bytes_per_s, stand_in)


def _bandwidth(taken_s: float, bytes_per_s: float, stand_in: bool) -> Figures:
    share = bytes_per_s / _copy_bytes_per_s(stand_in)
    return {"us": taken_s * 1e6, "TB/s": bytes_per_s / 1e12, "of copy": share}


def prefill(candidate: Any, case: Case, rows: list[tuple[int, int]], stand_in: bool) -> Figures:
    taken_s, _ = _attention_s(candidate, case, rows, stand_in)
    # Two products of q_len x kv_len / 2 x head_dim a head, causal work counted once.
    pairs = sum(q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2 for q_len, kv_len in rows)
    flops = 4 * case.shape.num_heads * case.shape.head_dim * pairs / taken_s
    return {"ms": taken_s * 1e3, "TFLOP/s": flops / 1e12, "of matmul": flops / _matmul_flops_per_s(stand_in)}


def jax_own(shape: AttentionShape, rows: list[tuple[int, int]], dtype: str, stand_in: bool) -> Figures:
    try:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    except ImportError as error:
        raise Skipped(f"this JAX has none: {error}") from error
    if stand_in:
        raise Skipped("it compiles for GPUs only")
    batch = batches.make(shape, rows, dtype, num_padding=0)
    k, v = (jnp.nan_to_num(leaf[:, 0].swapaxes(0, 1)) for leaf in batch.cache[:2])  # [heads, blocks, tokens, head_dim]
    tables, lens = jnp.maximum(batch.ragged.block_tables, 0), batch.ragged.kv_lens
    jitted = jax.jit(lambda state, k, v, tables, lens: paged_attention(state, k, v, tables, lens))
    taken_s = per_call_s(lambda state: jitted(state, k, v, tables, lens), batch.q)
    bytes_per_s = (
        sum(kv_len for _, kv_len in rows) * 2 * shape.num_kv_heads * shape.head_dim * k.dtype.itemsize / taken_s
    )
    return _bandwidth(taken_s, bytes_per_s, stand_in)


def quantised(candidate: Any, stand_in: bool) -> Figures:
    """Products of 16 tokens with a 4-bit weight: bytes of the weight a second."""
    num_tokens, num_in, num_out, group = (2, 256, 256, 64) if stand_in else (16, 8192, 8192, 128)
    need = quant_matmul.QuantNeed(platform(), num_tokens, num_in, num_out, group, jnp.dtype("bfloat16"), capability())
    reason = candidate.refuse(need)
    if reason is not None:
        raise Refused(reason)
    weight = quant_matmul.Int4Weight(
        jnp.ones((num_in // 2, num_out), jnp.uint8),
        jnp.full((num_in // group, num_out), 0.01, jnp.bfloat16),
        jnp.full((num_in // group, num_out), 8, jnp.uint8),
        None,
        platform(),
        capability(),
    )
    multiply = jax.jit(lambda x, weight: candidate.backend.multiply(x, weight).astype(x.dtype))
    x = jnp.ones((num_tokens, num_in), jnp.bfloat16)
    taken_s = per_call_s(lambda state: multiply(state, weight), x, least_s=_least_s(stand_in))
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in (weight.quants, weight.scales, weight.zeros))
    return _bandwidth(taken_s, num_bytes / taken_s, stand_in)
