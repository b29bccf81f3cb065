"""Which class runs which architecture."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pagedjax.core.errors import ConfigError
from pagedjax.models.config import ModelConfig
from pagedjax.models.llama import LlamaForCausalLM

MODELS: Mapping[str, type[LlamaForCausalLM]] = MappingProxyType({"LlamaForCausalLM": LlamaForCausalLM})


def config_of(stated: Mapping[str, Any]) -> ModelConfig:
    """The config of a parsed config.json. One of an architecture that is not known may have other fields altogether, so
    ConfigError says that first."""
    names = stated.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] not in MODELS:
        raise _unknown(names[0])
    return ModelConfig.from_hf(stated)


def find(config: ModelConfig) -> type[LlamaForCausalLM]:
    """The model class of a config. Raises ConfigError for an architecture that is not known."""
    try:
        return MODELS[config.architecture]
    except KeyError:
        raise _unknown(config.architecture) from None


def _unknown(architecture: Any) -> ConfigError:
    return ConfigError(f"architecture {architecture!r} is not supported; known: {', '.join(MODELS)}")
