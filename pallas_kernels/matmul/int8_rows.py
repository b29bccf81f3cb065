"""Rows of 8 bits, for CPUs without native kernels: half of bfloat16's bytes, and as much less of a decode step's time.

A weight [out, in] is int8 with a scale an output. An input has a scale a token and 16 bits, as two rows of 8, so that
outliers cost the other values nothing (with 8 bits perplexity rises by a percent; LLM.int8(), arXiv:2208.07339, keeps
outliers apart): one product of integers in XLA, which takes ten times as long for one row as for two anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.matmul.layouts import Layout, register

LARGEST = 127
# Of a low digit for one of the high, which it rounds to nearest.
LOW_STEPS = 2 * LARGEST
# A sum of so many products of two of the largest fits into 32 bits.
MAX_INPUTS = (1 << 31) // LARGEST**2
_Key = TypeVar("_Key")


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "scales"], meta_fields=["first"])
@dataclass(frozen=True)
class Int8Rows:
    """rows [out, in] int8; output i has scale `first` + i of `scales`, float32, which many weights may share."""

    rows: jax.Array
    scales: jax.Array
    first: int = 0

    @property
    def own_scales(self) -> jax.Array:
        """[out]."""
        return lax.slice(self.scales, (self.first,), (self.first + self.rows.shape[0],))


def round_rows(weight: np.ndarray) -> Int8Rows:
    """A weight [out, in] of any float type, each row rounded. Raises ValueError for too many inputs."""
    if weight.shape[1] > MAX_INPUTS:
        raise ValueError(f"{weight.shape[1]} inputs are more than the {MAX_INPUTS} whose sum fits into 32 bits")
    wide = weight.astype(np.float32, copy=False)
    scales = np.abs(wide).max(axis=1) / LARGEST
    rows = np.rint(wide / np.where(scales == 0, 1, scales)[:, None]).astype(np.int8)
    return Int8Rows(jnp.asarray(rows), jnp.asarray(scales))


def share_scales(weights: Mapping[_Key, Int8Rows]) -> dict[_Key, Int8Rows]:
    """The weights with their scales in one array, so that a step has half as many to take."""
    if not weights:
        return {}
    whole = jnp.concatenate([weight.own_scales for weight in weights.values()])
    firsts = accumulate((weight.rows.shape[0] for weight in weights.values()), initial=0)
    return {name: replace(weight, scales=whole, first=first) for (name, weight), first in zip(weights.items(), firsts)}


def _matmul(x: jax.Array, weight: Int8Rows) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / LARGEST
    scaled = wide / jnp.where(scale == 0, 1, scale)
    high = jnp.rint(scaled)
    low = jnp.rint((scaled - high) * LOW_STEPS)
    digits = jnp.concatenate([high, low]).astype(jnp.int8)
    dimensions = (((1,), (1,)), ((), ()))
    sums = lax.dot_general(digits, weight.rows, dimensions, preferred_element_type=jnp.int32).astype(jnp.float32)
    return (sums[: len(x)] + sums[len(x) :] / LOW_STEPS) * scale * weight.own_scales


def _take_rows(weight: Int8Rows, ids: jax.Array) -> jax.Array:
    return weight.rows[ids].astype(jnp.float32) * weight.own_scales[ids][:, None]


register(Int8Rows, Layout(_matmul, _take_rows))
