"""The definition of a product with 4-bit weights: dequantise, then multiply, all in float32."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quant_matmul.interface import PAIRED, Int4Weight, QuantBackend


def dequantise(weight: Int4Weight) -> jax.Array:
    """The values by place, [in, out], float32."""
    pairs = weight.quants.reshape(-1, PAIRED, weight.num_out)
    quants = jnp.stack([pairs & 15, pairs >> 4], axis=1).reshape(weight.num_in, weight.num_out)
    scales, zeros = (
        jnp.repeat(x.astype(jnp.float32), weight.group_size, axis=0) for x in (weight.scales, weight.zeros)
    )
    return (quants.astype(jnp.float32) - zeros) * scales


def ordered(x: jax.Array, weight: Int4Weight) -> jax.Array:
    """x [tokens, in] by place."""
    return x if weight.order is None else x[:, weight.order]


def multiply(x: jax.Array, weight: Int4Weight) -> jax.Array:
    """See `QuantBackend`."""
    wide = ordered(x, weight).astype(jnp.float32)
    return jnp.matmul(wide, dequantise(weight), precision=lax.Precision.HIGHEST)


def take_rows(weight: Int4Weight, ids: jax.Array) -> jax.Array:
    """Rows `ids` [n] of the weight [out, in]: [n, in], float32."""
    parts = {name: jnp.take(getattr(weight, name), ids, axis=1, mode="clip") for name in ("quants", "scales", "zeros")}
    rows = dequantise(replace(weight, **parts)).T
    return rows if weight.order is None else jnp.zeros_like(rows).at[:, weight.order].set(rows)


BACKEND = QuantBackend("reference", multiply)
