"""Fill an abstract model from a checkpoint: each parameter exactly once, every mismatch named."""

from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.core.errors import ConfigError
from pallas_kernels.matmul import FloatWeight

Model = TypeVar("Model", bound=nnx.Module)
Tensor = TypeVar("Tensor", bound=Any)


class Part(NamedTuple):
    """A checkpoint tensor and the shape it must have."""

    name: str
    shape: tuple[int, ...]


# (the parts of a product's weight, the dtype it would have) -> the weight in another layout, or None for FloatWeight.
Pack = Callable[[tuple[Part, ...], Any], Any]
# What was packed, by the first part's name, in the order of use -> the same with its arrays joined; empties its input.
Join = Callable[[dict[str, Any]], dict[str, Any]]


def fill(
    model: Model,
    parts: Mapping[str, tuple[Part, ...]],
    get: Callable[[str], np.ndarray],
    names: Set[str],
    *,
    may_skip: Set[str] = frozenset(),
    pack: Pack | None = None,
    join: Join | None = None,
) -> Model:
    """`model` (from nnx.eval_shape) with parameter `a.b.weight` made of its parts, stacked along axis 0.

    Values are cast to the parameter's dtype, or packed where `pack` says so; it checks the shapes of what it packs.
    `join` gets all that was packed, in the order of `parts`. One parameter's tensors are in memory beside the model at
    a time. Raises ConfigError for missing, surplus and wrong-shaped tensors, by name.
    """
    wanted = {part.name for sources in parts.values() for part in sources}
    _refuse("has no", wanted - names)
    _refuse("has tensors that the model does not use:", names - wanted - may_skip)
    graph, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    unfilled = {".".join(map(str, path)) for path, _ in flat} ^ set(parts)
    assert not unfilled, f"the model's parameters and its parts differ: {unfilled}"
    abstract = {".".join(map(str, path)): var.get_value() for path, var in flat}
    made = {name: _made(abstract[name], sources, get, pack) for name, sources in parts.items()}
    if join is not None:
        names_of = {parts[name][0].name: name for name, value in made.items() if _is_packed(value)}
        joined = join({first: made.pop(name) for first, name in names_of.items()})
        made |= {names_of[first]: value for first, value in joined.items()}
    filled = [(path, var.replace(made.pop(".".join(map(str, path))))) for path, var in flat]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _made(abstract: Any, sources: tuple[Part, ...], get: Callable[[str], np.ndarray], pack: Pack | None) -> Any:
    """A value like `abstract` (a shape, or a FloatWeight of one) from the tensors of `sources`."""
    is_weight = isinstance(abstract, FloatWeight)
    shape = abstract.w if is_weight else abstract
    if is_weight and pack is not None and (packed := pack(sources, shape.dtype)) is not None:
        return jax.block_until_ready(packed)
    tensors = [checked(get(part.name), part) for part in sources]
    host = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
    assert host.shape == shape.shape
    # Copied, since `get` may give a view of a file that closes later; waited for, so that one tensor is in memory.
    array = jax.block_until_ready(jnp.array(host.astype(shape.dtype, copy=False), copy=True))
    return FloatWeight(array) if is_weight else array


def _is_packed(value: Any) -> bool:
    return not isinstance(value, jax.Array | FloatWeight)


def checked(tensor: Tensor, part: Part) -> Tensor:
    """`tensor`, anything with a shape. Raises ConfigError unless it has the part's."""
    if tensor.shape != part.shape:
        raise ConfigError(f"the checkpoint's {part.name} has shape {tensor.shape}, but the config says {part.shape}")
    return tensor


def _refuse(complaint: str, names: Set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ConfigError(f"the checkpoint {complaint} {shown}")
