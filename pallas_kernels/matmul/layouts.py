"""Weight layouts and the table that maps a layout's type to its functions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Layout(NamedTuple):
    """How to use one kind of weight of shape [out, in].

    `matmul(x [tokens, in], weight)` gives [tokens, out] in float32; `take_rows(weight, ids [n])` gives [n, in] in the
    layout's own compute dtype. `linear`, where there is one, is a fused way to do what `linear.linear` describes; it
    may give NotImplemented for what it can't do. `argmax`, where there is one, is that of `Largest` of a product.
    """

    matmul: Callable[[jax.Array, Any], jax.Array]
    take_rows: Callable[[Any, jax.Array], jax.Array]
    linear: Callable[..., Any] | None = None
    argmax: Callable[[jax.Array, Any], "Largest"] | None = None


class Largest(NamedTuple):
    """The largest result of each row of a product, float32, NaN where any result of the row is, and the output that
    has it, int32, the lowest of equals. Both [tokens]."""

    output: jax.Array
    value: jax.Array


_LAYOUTS: dict[type, Layout] = {}


def register(kind: type, layout: Layout) -> None:
    """Teach `matmul` and `take_rows` weights of type `kind`. Raises ValueError if it is known already."""
    if kind in _LAYOUTS:
        raise ValueError(f"{kind.__name__} is registered already")
    _LAYOUTS[kind] = layout


def matmul(x: jax.Array, weight: Any, out_dtype: Any = None) -> jax.Array:
    """x [tokens, in] times weight [out, in]: [tokens, out], summed in float32, in `out_dtype` (x's by default)."""
    return find(weight).matmul(x, weight).astype(out_dtype or x.dtype)


def fused_argmax(weight: Any) -> Callable[[jax.Array, Any], Largest] | None:
    """What gives the `Largest` of x [tokens, in] times weight [out, in] without writing the product, if anything."""
    return find(weight).argmax


def take_rows(weight: Any, ids: jax.Array) -> jax.Array:
    """Rows `ids` [n] of a weight [out, in]: [n, in]. Ids must be in range."""
    return find(weight).take_rows(weight, ids)


def find(weight: Any) -> Layout:
    """The layout of a weight. Raises NotImplementedError for one of a type that was not registered."""
    try:
        return _LAYOUTS[type(weight)]
    except KeyError:
        known = ", ".join(kind.__name__ for kind in _LAYOUTS)
        raise NotImplementedError(f"no matmul for weights of type {type(weight).__name__}; known: {known}") from None


@partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[])
@dataclass(frozen=True)
class FloatWeight:
    """Plain numbers, row-major as checkpoints keep them."""

    w: jax.Array  # [out, in]


def _float_matmul(x: jax.Array, weight: FloatWeight) -> jax.Array:
    # XLA:CPU converts a whole bf16 or f16 weight before a product of one row, and does not for two: 20–40 times.
    single = x.shape[0] == 1 and x.dtype != jnp.float32
    if single:
        x = jnp.concatenate([x, x])
    # A GPU would round float32 inputs to TF32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = lax.dot_general(
        x,
        weight.w.astype(x.dtype),
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out[:1] if single else out


register(FloatWeight, Layout(_float_matmul, lambda weight, ids: weight.w.at[ids].get(mode="clip")))
