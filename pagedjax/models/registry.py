"""Which class runs which architecture."""

from collections.abc import Mapping
from types import MappingProxyType

from pagedjax.core.errors import ConfigError
from pagedjax.models.config import ModelConfig
from pagedjax.models.llama import LlamaForCausalLM

MODELS: Mapping[str, type[LlamaForCausalLM]] = MappingProxyType({"LlamaForCausalLM": LlamaForCausalLM})


def find(config: ModelConfig) -> type[LlamaForCausalLM]:
    """The model class of a config. Raises ConfigError for an architecture that is not known."""
    try:
        return MODELS[config.architecture]
    except KeyError:
        known = ", ".join(MODELS)
        raise ConfigError(f"architecture {config.architecture!r} is not supported; known: {known}") from None
