"""Which backend multiplies with a 4-bit weight, and why the others don't."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul import jax_triton, pallas_triton, reference, xla
from pallas_kernels.quant_matmul.interface import Int4Weight, QuantBackend, QuantNeed


class Candidate(NamedTuple):
    """A backend and `refuse(need)`: the reason why it can't do that, or None."""

    backend: QuantBackend
    refuse: Callable[[QuantNeed], str | None]
    only_when_wished: bool = False


class Choice(NamedTuple):
    """The backend to use, and the reasons against the others by name, in order of preference."""

    backend: QuantBackend
    refused: Mapping[str, str]


def _always(need: QuantNeed) -> None:
    return None


# In order of preference.
CANDIDATES = (
    Candidate(pallas_triton.BACKEND, pallas_triton.refuse),
    Candidate(jax_triton.BACKEND, jax_triton.refuse),
    Candidate(xla.BACKEND, _always),
    Candidate(pallas_triton.INTERPRETED, pallas_triton.refuse_interpreted, only_when_wished=True),
    Candidate(reference.BACKEND, _always, only_when_wished=True),
)


def choose(need: QuantNeed, wish: str | None = None) -> Choice:
    """The first backend that can do it, or the wished one.

    Raises ValueError for an unknown wish and NotImplementedError, with the reason, if the wished backend refuses.
    """
    names = [candidate.backend.name for candidate in CANDIDATES]
    if wish is not None and wish not in names:
        raise ValueError(f"quant_matmul has no backend {wish!r}; it has {', '.join(names)}")
    refused: dict[str, str] = {}
    chosen: QuantBackend | None = None
    for candidate in CANDIDATES:
        reason = candidate.refuse(need) or _passed_over(candidate, wish, chosen)
        if reason is None:
            chosen = candidate.backend
        else:
            refused[candidate.backend.name] = reason
    if chosen is None:
        raise NotImplementedError(f"quant_matmul: {wish}: {refused[str(wish)]}")
    return Choice(chosen, MappingProxyType(refused))


def _passed_over(candidate: Candidate, wish: str | None, chosen: QuantBackend | None) -> str | None:
    if wish is not None:
        return None if candidate.backend.name == wish else f"{wish} is wished"
    if candidate.only_when_wished:
        return "runs only when wished for: it is slow"
    return None if chosen is None else f"{chosen.name} is preferred"


def multiply(x: jax.Array, weight: Int4Weight) -> jax.Array:
    """x [tokens, in] times the weight [out, in], by the backend of choice: [tokens, out] in float32."""
    sizes = x.shape[0], weight.num_in, weight.num_out, weight.group_size
    need = QuantNeed(weight.platform, *sizes, jnp.dtype(x.dtype), weight.capability)
    return choose(need).backend.multiply(x, weight)
