"""A model split over the devices of a mesh axis: each has some heads and some of the inner features (arXiv:1909.08053).

The products into attention and the inner layer are split by outputs, those out of them by inputs, so a layer sums twice
over the axis. Embeddings, norms and hidden states are whole on each device. The head is split by tokens.

Programs only: they compile, and compute what a whole model does; no runner drives them on several devices yet.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from pagedjax.core.errors import ConfigError
from pagedjax.models.config import ModelConfig

AXIS = "tp"
# The axis along which a product's parameters lie on the devices one after the other; others are whole on each.
_SPLIT: dict[tuple[str, ...], int] = {
    ("qkv_proj", "weight"): 0,
    ("qkv_proj", "bias"): 0,
    ("gate_up_proj", "weight"): 0,
    ("gate_up_proj", "bias"): 0,
    ("o_proj", "weight"): 1,
    ("down_proj", "weight"): 1,
    ("lm_head", "weight"): 0,
}


def shard_of(config: ModelConfig, size: int) -> ModelConfig:
    """The config of one of `size` shards. Raises ConfigError where something does not divide."""
    parts = {name: getattr(config, name) for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")}
    uneven = {name: count for name, count in parts.items() if count % size}
    if uneven:
        told = ", ".join(f"{name} {count}" for name, count in uneven.items())
        raise ConfigError(f"{told} cannot be split over {size} devices; take a number that divides all")
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def split_axis(names: tuple[str, ...]) -> int | None:
    """The axis along which a parameter (… module, name) is split, or None for one that is whole."""
    return _SPLIT.get(names[-2:])


def arranged(names: tuple[str, ...], values: Any, config: ModelConfig, size: int) -> Any:
    """A whole parameter's values in the order in which they are split: where several products share a weight (q, k and
    v; gate and up), each shard's rows of all of them follow one another."""
    q, kv, inner = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    lengths = {"qkv_proj": (q, kv, kv), "gate_up_proj": (inner, inner)}.get(names[-2])
    if lengths is None:
        return values
    parts = np.split(np.asarray(values), np.cumsum(lengths)[:-1])
    shares = [np.split(part, size) for part in parts]
    return np.concatenate([share[i] for i in range(size) for share in shares])
