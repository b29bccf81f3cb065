"""A product with what lies around it in a decoder: norm before, bias, SwiGLU and residual after."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.layouts import find, matmul


class Norm(NamedTuple):
    """An RMSNorm's numbers: weight [features] in float32."""

    weight: jax.Array
    eps: float


def linear(
    x: jax.Array,
    weight: Any,
    *,
    norm: Norm | None = None,
    bias: jax.Array | None = None,
    gated: bool = False,
    residual: jax.Array | None = None,
    fine_input: bool = False,
    out_dtype: Any = None,
) -> jax.Array:
    """residual + act(norm(x) @ weight.T + bias): [tokens, out] in `out_dtype` (x's by default).

    x is [tokens, in], weight [out, in], bias [out]. Where `gated`, act is SwiGLU: the silu of the first half of the
    outputs times the second half, so that the result has out / 2 columns. `residual` is like the result. `fine_input`
    says that x has outliers beside which other values matter: a layout that quantises x keeps more digits then.
    """
    out_dtype = out_dtype or x.dtype
    fused = find(weight).linear
    if fused is not None:
        options = {"norm": norm, "bias": bias, "gated": gated, "residual": residual, "fine_input": fine_input}
        out = fused(x, weight, out_dtype=out_dtype, **options)
        if out is not NotImplemented:
            return out
    return _composed(x, weight, norm, bias, gated, out_dtype, residual)


def _composed(
    x: jax.Array,
    weight: Any,
    norm: Norm | None,
    bias: jax.Array | None,
    gated: bool,
    out_dtype: Any,
    residual: jax.Array | None,
) -> jax.Array:
    if norm is not None:
        x = rms_norm(x, norm)
    out = matmul(x, weight, jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    if gated:
        gate, up = jnp.split(out, 2, axis=-1)
        out = jax.nn.silu(gate) * up
    out = out.astype(out_dtype)
    return out if residual is None else residual + out


def rms_norm(x: jax.Array, norm: Norm) -> jax.Array:
    """x / rms(x) * weight along the last axis, computed in float32, in x's dtype (arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + norm.eps)
    return (normal * norm.weight).astype(x.dtype)
