"""What a checkpoint says about its architecture: one frozen record for every model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagedjax.core.errors import ConfigError


class Llama3Scaling(NamedTuple):
    """Llama 3.1's rotary scaling: long waves are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class LinearScaling(NamedTuple):
    """Every position divided by `factor`."""

    factor: float


RopeScaling = Llama3Scaling | LinearScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Names are the Hugging Face config's. Raises ConfigError for values that cannot be a model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"the model's {name} must be positive, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the model's {self.num_heads} heads do not divide among its {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"the model's head_dim {self.head_dim} must be even for rotary embeddings")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """From a parsed config.json. Raises ConfigError for fields that are missing or not supported, by name."""
        try:
            return cls(**_fields(config))
        except KeyError as missing:
            raise ConfigError(f"config.json has no {missing}") from None


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)

# Values that change the forward pass in ways no model here follows. The first value is the one that is followed.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "sliding_window": (None,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    for name, followed in _ONLY.items():
        if config.get(name, followed[0]) not in followed:
            raise ConfigError(f"config.json: {name} {config[name]!r} is not supported")
    num_heads, hidden_size = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: the rotary parameters must be an object, not {rope!r}")
    return {
        "architecture": _architecture(config),
        "vocab_size": _count(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _count(config, "intermediate_size"),
        "num_layers": _count(config, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": _count(config, "num_key_value_heads", num_heads),
        "head_dim": _count(config, "head_dim", hidden_size // num_heads),
        "rms_norm_eps": _number(config, "rms_norm_eps", 1e-6),
        # transformers 5 moved the base into rope_parameters.
        "rope_theta": _number(rope if rope.get("rope_theta") else config, "rope_theta", 10_000.0),
        "rope_scaling": rope_scaling(rope),
        "max_position_embeddings": _count(config, "max_position_embeddings", 2048),
        "tie_word_embeddings": _flag(config, "tie_word_embeddings"),
        "attention_bias": _flag(config, "attention_bias"),
        "mlp_bias": _flag(config, "mlp_bias"),
        "hidden_act": str(config.get("hidden_act", "silu")),
    }


def rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    """The record of a `rope_scaling` (or `rope_parameters`) mapping. Raises ConfigError for a kind not known."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_positive(rope, "factor"))
    if kind == "llama3":
        numbers = [_positive(rope, name) for name in Llama3Scaling._fields]
        return Llama3Scaling(*numbers[:3], int(numbers[3]))
    raise ConfigError(f"rope scaling {kind!r} is not supported; known: default, linear, llama3")


def _positive(rope: Mapping[str, Any], name: str) -> float:
    value = rope.get(name)
    if not _is_positive(value):
        raise ConfigError(f"rope scaling needs a positive {name}, not {value!r}")
    return float(value)


def _is_positive(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _number(config: Mapping[str, Any], name: str, otherwise: float) -> float:
    """A positive number; it may be missing or null."""
    value = config.get(name)
    if value is None:
        return otherwise
    if not _is_positive(value):
        raise ConfigError(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], name: str) -> bool:
    """True or false; it may be missing or null, which is false."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"config.json: {name} must be true or false, not {value!r}")
    return bool(value)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(f"config.json must name one architecture, not {names!r}")
    return str(names[0])


def _count(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    """A positive integer; where `otherwise` is given it may be missing or null."""
    value = config[name] if otherwise is None else config.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value
