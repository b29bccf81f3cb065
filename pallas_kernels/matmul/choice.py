"""Which layout suits a model's weights on this machine, and why the others don't."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import native

LayoutName = Literal["grouped", "packed_bf16", "int8_rows", "float"]
NAMES: tuple[LayoutName, ...] = ("grouped", "packed_bf16", "int8_rows", "float")  # in order of preference


class LayoutChoice(NamedTuple):
    """The layout to use, and the reasons against the others by name, in order of preference."""

    name: LayoutName
    refused: Mapping[str, str]


def preferred(dtype: Any, *, not_grouped: str | None) -> LayoutChoice:
    """For a model that computes in `dtype`; `not_grouped` is the reason against groups, if there is one.

    "grouped" keeps groups of 4 or 8 bits, "packed_bf16" holds bfloat16 for native kernels; "int8_rows" rounds what was
    in groups to 8 bits a row, and "float" is what it is, both XLA's. Raises ValueError for a variable of the
    environment that means nothing (see `native`).
    """
    missing = native.unavailable()
    refused: dict[str, str] = {}
    for name in NAMES:
        reason = _refusal(name, jnp.dtype(dtype), not_grouped, missing)
        if reason is None:
            for other in NAMES[NAMES.index(name) + 1 :]:
                refused[other] = f"{name} is preferred"
            return LayoutChoice(name, MappingProxyType(refused))
        refused[name] = reason
    raise AssertionError("float is never refused")


def not_in_rows() -> str | None:
    """Why weights are no rows of 8 bits here, if there is a reason."""
    if jax.default_backend() != "cpu":
        return f"they are for CPUs, and this is {jax.default_backend()}"
    if jax.__version_info__ < (0, 11):
        return f"JAX {jax.__version__} multiplies integers more slowly than floats, from 16 tokens on"
    return None


def _refusal(name: LayoutName, dtype: Any, not_grouped: str | None, missing: str | None) -> str | None:
    if name == "float":
        return None
    if name == "int8_rows":
        return not_grouped or not_in_rows()
    if missing is not None:
        return f"it needs the native kernels: {missing}"
    if name == "grouped":
        return not_grouped
    if dtype != jnp.bfloat16:
        return f"it rounds, and the model computes in {dtype}"
    return None
