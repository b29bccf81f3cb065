"""Choose how to run an op here, and say why the other ways were refused."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import triton
from pallas_kernels.attention import AttentionNeed, AttentionShape, AttentionVariant
from pallas_kernels.kv_write import KVWriteBackend
from pallas_kernels.kv_write import pallas_triton as kv_write_triton
from pallas_kernels.kv_write import reference as kv_write_reference
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.paged_attention import PagedBackend
from pallas_kernels.paged_attention import jax_triton as paged_jax_triton
from pallas_kernels.paged_attention import pallas_mosaic as paged_mosaic
from pallas_kernels.paged_attention import pallas_triton as paged_triton
from pallas_kernels.paged_attention import reference as paged_reference
from pallas_kernels.ragged_attention import AttentionBackend, native, pallas_mosaic, pallas_triton, reference, xla

Backend = AttentionBackend | PagedBackend | KVWriteBackend


class Candidate(NamedTuple):
    """A backend, and `refuse(need)`: the reason why it can't do that, or None.

    One with `only_when_wished` is never chosen by itself.
    """

    backend: Backend
    refuse: Callable[[AttentionNeed], str | None]
    only_when_wished: bool = False


class Choice(NamedTuple):
    """The backend to use (of the op's own kind), and the reasons against the others by name, in order of preference."""

    backend: Any
    refused: Mapping[str, str]


def _always(need: AttentionNeed) -> None:
    return None


_PLAIN = AttentionVariant()

# In order of preference.
CANDIDATES: Mapping[str, tuple[Candidate, ...]] = MappingProxyType(
    {
        "ragged_attention": (
            Candidate(pallas_mosaic.BACKEND, pallas_mosaic.refuse),
            Candidate(pallas_triton.BACKEND, triton.refuse),
            Candidate(native.BACKEND, native.refuse),
            Candidate(xla.BACKEND, _always),
            Candidate(pallas_mosaic.INTERPRETED, pallas_mosaic.refuse_interpreted, only_when_wished=True),
            Candidate(pallas_triton.INTERPRETED, triton.refuse_interpreted, only_when_wished=True),
            Candidate(reference.BACKEND, _always, only_when_wished=True),
        ),
        "paged_attention": (
            Candidate(paged_mosaic.BACKEND, paged_mosaic.refuse),
            Candidate(paged_triton.BACKEND, triton.refuse),
            Candidate(paged_jax_triton.BACKEND, paged_jax_triton.refuse),
            Candidate(paged_reference.BACKEND, _always),
            Candidate(paged_mosaic.INTERPRETED, paged_mosaic.refuse_interpreted, only_when_wished=True),
            Candidate(paged_triton.INTERPRETED, triton.refuse_interpreted, only_when_wished=True),
        ),
        "kv_write": (
            Candidate(kv_write_triton.BACKEND, triton.refuse),
            Candidate(kv_write_xla.BACKEND, _always),
            Candidate(kv_write_triton.INTERPRETED, triton.refuse_interpreted, only_when_wished=True),
            Candidate(kv_write_reference.BACKEND, _always, only_when_wished=True),
        ),
    }
)


def names(op: str) -> tuple[str, ...]:
    """The backends that can be wished for."""
    return tuple(candidate.backend.name for candidate in CANDIDATES[op])


def capability_of(device: Any) -> tuple[int, int] | None:
    """A JAX device's compute capability; None for one that is no Nvidia GPU."""
    numbers = str(getattr(device, "compute_capability", "")).split(".")
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdigit, numbers)) else None


def choose(
    op: str,
    *,
    platform: str,
    shape: AttentionShape,
    dtype: Any,
    variant: AttentionVariant = _PLAIN,
    capability: tuple[int, int] | None = None,
    wish: str | None = None,
) -> Choice:
    """The first backend of `op` that can run `shape` in `dtype` on `platform` ("cpu", "gpu"), or the wished one.

    `variant` tells what the model's attention adds and how its cache is kept, `capability` the GPU's generation.
    Raises KeyError for an unknown op, ValueError for an unknown wish or a shape that no model can have, and
    NotImplementedError, with the reasons, if the wished backend (or, without a wish, every backend) refuses.
    """
    _check(shape)
    need = AttentionNeed(platform, shape, jnp.dtype(dtype), variant, capability)
    if wish is not None and wish not in names(op):
        raise ValueError(f"{op} has no backend {wish!r}; it has {', '.join(names(op))}")
    refused, chosen = {}, None
    for candidate in CANDIDATES[op]:
        name = candidate.backend.name
        reason = candidate.refuse(need)
        if reason is not None:
            refused[name] = reason
        elif wish is not None and name != wish:
            refused[name] = f"{wish} is wished"
        elif wish is None and candidate.only_when_wished:
            refused[name] = "runs only when wished for: it is slow"
        elif chosen is not None:
            refused[name] = f"{chosen.name} is preferred"
        else:
            chosen = candidate.backend
    if chosen is None:
        reasons = {wish: refused[wish]} if wish else refused
        raise NotImplementedError(f"{op}: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return Choice(chosen, MappingProxyType(refused))


def _check(shape: AttentionShape) -> None:
    if min(shape) < 1:
        raise ValueError(f"{shape} must be positive throughout")
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{shape.num_heads} heads do not divide among {shape.num_kv_heads} KV heads")
