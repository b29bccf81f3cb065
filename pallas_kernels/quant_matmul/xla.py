"""Dequantise to the activations' type, then one plain product: for many tokens, and for every device.

Bytes: the 4-bit weight is read once, and the wide one written and read once, 4.5 bytes a weight in all at 16 bits; so
it pays where the product itself takes longer than that. Rounds each weight to the activations' type.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.matmul import FloatWeight, matmul
from pallas_kernels.quant_matmul.interface import Int4Weight, QuantBackend
from pallas_kernels.quant_matmul.reference import dequantise, ordered


def multiply(x: jax.Array, weight: Int4Weight) -> jax.Array:
    """See `QuantBackend`."""
    values = dequantise(weight).astype(x.dtype)
    return matmul(ordered(x, weight), FloatWeight(values.T), jnp.float32)


BACKEND = QuantBackend("xla", multiply)
