"""Choose how to run an op here, and say why the other ways were refused."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from pallas_kernels import triton
from pallas_kernels.attention import AttentionNeed, AttentionShape, AttentionVariant
from pallas_kernels.candidates import Candidate, Choice, always, first_able
from pallas_kernels.kv_write import pallas_triton as kv_write_triton
from pallas_kernels.kv_write import reference as kv_write_reference
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.paged_attention import jax_triton as paged_jax_triton
from pallas_kernels.paged_attention import pallas_mosaic as paged_mosaic
from pallas_kernels.paged_attention import pallas_triton as paged_triton
from pallas_kernels.paged_attention import reference as paged_reference
from pallas_kernels.ragged_attention import native, pallas_mosaic, pallas_triton, reference, xla

_PLAIN = AttentionVariant()

# In order of preference.
CANDIDATES: Mapping[str, tuple[Candidate, ...]] = MappingProxyType(
    {
        "ragged_attention": (
            Candidate(pallas_mosaic.BACKEND, pallas_mosaic.refuse),
            Candidate(pallas_triton.BACKEND, triton.refuse),
            Candidate(native.BACKEND, native.refuse),
            Candidate(xla.BACKEND, always),
            Candidate(pallas_mosaic.INTERPRETED, pallas_mosaic.refuse_interpreted, only_when_wished=True),
            Candidate(pallas_triton.INTERPRETED, triton.refuse_interpreted, only_when_wished=True),
            Candidate(reference.BACKEND, always, only_when_wished=True),
        ),
        "paged_attention": (
            Candidate(paged_mosaic.BACKEND, paged_mosaic.refuse),
            Candidate(paged_triton.BACKEND, triton.refuse),
            Candidate(paged_jax_triton.BACKEND, paged_jax_triton.refuse),
            Candidate(paged_reference.BACKEND, always),
            Candidate(paged_mosaic.INTERPRETED, paged_mosaic.refuse_interpreted, only_when_wished=True),
            Candidate(paged_triton.INTERPRETED, triton.refuse_interpreted, only_when_wished=True),
        ),
        "kv_write": (
            Candidate(kv_write_triton.BACKEND, triton.refuse),
            Candidate(kv_write_xla.BACKEND, always),
            Candidate(kv_write_triton.INTERPRETED, triton.refuse_interpreted, only_when_wished=True),
            Candidate(kv_write_reference.BACKEND, always, only_when_wished=True),
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
    return first_able(op, CANDIDATES[op], need, wish)


def _check(shape: AttentionShape) -> None:
    if min(shape) < 1:
        raise ValueError(f"{shape} must be positive throughout")
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{shape.num_heads} heads do not divide among {shape.num_kv_heads} KV heads")
