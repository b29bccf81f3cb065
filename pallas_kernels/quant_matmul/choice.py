"""Which backend multiplies with a 4-bit weight, and why the others don't."""

import jax
import jax.numpy as jnp

from pallas_kernels.candidates import Candidate, Choice, always, first_able
from pallas_kernels.quant_matmul import jax_triton, pallas_triton, reference, xla
from pallas_kernels.quant_matmul.interface import Int4Weight, QuantNeed

# In order of preference.
CANDIDATES = (
    Candidate(pallas_triton.BACKEND, pallas_triton.refuse),
    Candidate(jax_triton.BACKEND, jax_triton.refuse),
    Candidate(xla.BACKEND, always),
    Candidate(pallas_triton.INTERPRETED, pallas_triton.refuse_interpreted, only_when_wished=True),
    Candidate(reference.BACKEND, always, only_when_wished=True),
)


def choose(need: QuantNeed, wish: str | None = None) -> Choice:
    """The first backend that can do it, or the wished one.

    Raises ValueError for an unknown wish and NotImplementedError, with the reason, if the wished backend refuses.
    """
    return first_able("quant_matmul", CANDIDATES, need, wish)


def multiply(x: jax.Array, weight: Int4Weight) -> jax.Array:
    """x [tokens, in] times the weight [out, in], by the backend of choice: [tokens, out] in float32."""
    sizes = x.shape[0], weight.num_in, weight.num_out, weight.group_size
    need = QuantNeed(weight.platform, *sizes, jnp.dtype(x.dtype), weight.capability)
    return choose(need).backend.multiply(x, weight)
