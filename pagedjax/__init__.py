"""Serve language models with paged attention and continuous batching, in JAX.

Importing the package is cheap: `LLM`, `SamplingParams`, `EngineConfig` and `AsyncEngine` load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax.core.request import SamplingParams
    from pagedjax.core.structure import StructuredOutputsParams
    from pagedjax.engine.async_engine import AsyncEngine
    from pagedjax.engine.config import EngineConfig
    from pagedjax.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "EngineConfig", "SamplingParams", "StructuredOutputsParams"]

_HOMES = {
    "LLM": "pagedjax.llm",
    "AsyncEngine": "pagedjax.engine.async_engine",
    "EngineConfig": "pagedjax.engine.config",
    "SamplingParams": "pagedjax.core.request",
    "StructuredOutputsParams": "pagedjax.core.structure",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
