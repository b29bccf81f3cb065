"""Building an engine: what was chosen for the fields left automatic is said."""

from pagedjax.engine.build import chosen
from pagedjax.engine.config import EngineConfig, resolve
from tests.runtime.tiny import CONFIG


def test_what_was_left_automatic_is_told_as_it_was_filled_in():
    config = resolve(EngineConfig(compilation_cache_dir="/tmp/x"), CONFIG, platform="cpu")
    told = dict(pair.split("=") for pair in chosen(config, "xla", "float", 7).split())
    assert told == {
        "dtype": config.dtype,
        "max_model_len": str(CONFIG.max_position_embeddings),
        "max_num_batched_tokens": "256",
        "num_blocks": "7",
        "attention_backend": "xla",
        "weights": "float",
        "compilation_cache_dir": "/tmp/x",
    }
