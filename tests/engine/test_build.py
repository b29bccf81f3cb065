"""Building an engine: what was chosen for the fields left automatic is said, and what cannot be is refused first."""

import shlex
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace

import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.engine import build
from pagedjax.engine.build import chosen
from pagedjax.engine.config import EngineConfig, resolve
from pagedjax.engine.quantisation import WeightChoice
from pagedjax.weights.pack import PackedWeight
from tests.runtime.tiny import CONFIG

CHOICE = WeightChoice("int8", "it is asked for", MappingProxyType({}))


def test_what_was_left_automatic_is_told_as_it_was_filled_in():
    config = resolve(EngineConfig(compilation_cache_dir="/tmp/x"), CONFIG, platform="cpu")
    weights = [PackedWeight(name, frozenset({"Q6_K"}), "8 bits", 1_000_000, 1.0, 40_000.0) for name in "ab"]
    told = dict(
        pair.split("=") for pair in shlex.split(chosen(config, "xla", CHOICE, weights, 7, weights_cache="read"))
    )
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
        "weights_cache": "read",
        "compilation_cache_dir": "/tmp/x",
    }


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"attention_backend": "fast"}, "--attention-backend"), ({"max_model_len": 10**6}, "--max-model-len")],
)
def test_what_the_checkpoint_s_head_rules_out_is_refused_before_anything_is_loaded(monkeypatch, options, flag):
    head = SimpleNamespace(config=CONFIG, encodings={}, tokenizer_source="nowhere")
    monkeypatch.setattr(build.store, "resolve", lambda *_: "nowhere")
    monkeypatch.setattr(build.load, "open_checkpoint", lambda path: nullcontext(head))
    monkeypatch.setattr(build, "load_tokenizer", lambda path: pytest.fail("read the tokenizer"))
    with pytest.raises(ConfigError, match=flag):
        build.build_engine(EngineConfig(**options))


def test_a_time_slice_that_nothing_uses_is_told(caplog):
    for slice_ms, is_told in ((50, True), (0, False), (None, False)):
        caplog.clear()
        with pytest.raises(ConfigError, match="no-such-model"):
            build.build_engine(EngineConfig(model="no-such-model", enable_preemption=False, time_slice=slice_ms))
        assert ("event=no_effect setting=time_slice" in caplog.text) == is_told


def test_a_recording_that_cannot_be_written_is_refused_before_a_model_is_looked_for(tmp_path):
    with pytest.raises(ConfigError, match="--record"):
        build.build_engine(EngineConfig(model="no-such-model", record=str(tmp_path / "missing" / "r")))
