"""Building an engine: what was chosen for the fields left automatic is said."""

import shlex
from types import MappingProxyType

from pagedjax.engine.build import chosen
from pagedjax.engine.config import EngineConfig, resolve
from pagedjax.engine.quantisation import WeightChoice
from pagedjax.weights.pack import PackedWeight
from tests.runtime.tiny import CONFIG

CHOICE = WeightChoice("int8", "it is asked for", MappingProxyType({}))


def test_what_was_left_automatic_is_told_as_it_was_filled_in():
    config = resolve(EngineConfig(compilation_cache_dir="/tmp/x"), CONFIG, platform="cpu")
    weights = [PackedWeight(name, frozenset({"Q6_K"}), "8 bits", 1_000_000, 1.0, 40_000.0) for name in "ab"]
    told = dict(pair.split("=") for pair in shlex.split(chosen(config, "xla", CHOICE, weights, 7)))
    assert told == {
        "dtype": config.dtype,
        "max_model_len": str(CONFIG.max_position_embeddings),
        "max_num_batched_tokens": "256",
        "num_blocks": "7",
        "attention_backend": "xla",
        "kv_cache_dtype": "auto",
        "weights": "int8",
        "weights_reason": "it is asked for",
        "weights_packed": "2.0M Q6_K in 8 bits, error 0.50%",
        "compilation_cache_dir": "/tmp/x",
    }
