"""From a configuration to a warm engine: find the model, resolve what is automatic, load, compile."""

import time
from collections.abc import Callable
from pathlib import Path

import jax

from pagedjax.core.errors import ConfigError
from pagedjax.engine.config import EngineConfig, resolve
from pagedjax.engine.engine import Engine
from pagedjax.engine.tokenizer import load_tokenizer
from pagedjax.models.config import ModelConfig
from pagedjax.runtime.runner import Runner
from pagedjax.weights import load, store
from pallas_kernels import dispatch
from pallas_kernels.ragged_attention import AttentionBackend, AttentionShape
