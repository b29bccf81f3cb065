import dataclasses

import numpy as np
import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.models import registry, rope
from pagedjax.models.config import LinearScaling, Llama3Scaling, ModelConfig
from pallas_kernels.ragged_attention import xla

HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}


def without(name):
    return {key: value for key, value in HF.items() if key != name}


def test_an_architecture_that_is_not_known_is_said_before_fields_that_are_missing():
    with pytest.raises(ConfigError, match="architecture 'GPT2LMHeadModel' is not supported"):
        registry.config_of({"architectures": ["GPT2LMHeadModel"], "n_head": 12})


def test_a_config_json_is_read_in_full():
    config = ModelConfig.from_hf(HF)
    assert config.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (16, 32, 8, 64)
    assert config.tie_word_embeddings


def test_what_a_config_json_leaves_out_has_the_usual_meaning():
    config = ModelConfig.from_hf(without("num_key_value_heads") | {"rope_scaling": None})
    assert (config.num_kv_heads, config.rope_scaling) == (32, None)
    assert not config.attention_bias


def test_the_rotary_base_may_lie_among_the_rope_parameters():
    config = ModelConfig.from_hf(
        without("rope_theta") | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    )
    assert (config.rope_theta, config.rope_scaling) == (7.0, None)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_field_is_named(name):
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_hf(without(name))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "positive factor, not 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "positive low_freq_factor, not None"),
        ({"architectures": []}, "must name one architecture"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_key_value_heads": 5}, "do not divide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"head_dim": 63}, "must be even"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ModelConfig.from_hf(HF | change)


COUNTS = [name for name, value in HF.items() if isinstance(value, int) and not isinstance(value, bool)]


@pytest.mark.parametrize("value", [0, -1, "32", 3.5, True, [], {}])
@pytest.mark.parametrize("name", [*COUNTS, "head_dim"])
def test_a_size_that_is_no_positive_integer_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_hf(HF | {name: value})


@pytest.mark.parametrize("value", ["1e-5", -1.0, float("nan"), float("inf"), [], {}, True])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_a_number_that_is_none_or_not_positive_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_hf(HF | {name: value})


@pytest.mark.parametrize("value", ["false", 0, []])
@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_a_flag_that_is_neither_true_nor_false_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_hf(HF | {name: value})


@pytest.mark.parametrize("change", [{"architectures": 1}, {"architectures": "Llama"}, {"rope_scaling": "llama3"}])
def test_values_of_another_kind_are_refused(change):
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_hf(HF | change)


def test_an_unknown_architecture_names_the_known_ones():
    config = dataclasses.replace(ModelConfig.from_hf(HF), architecture="MambaForCausalLM")
    with pytest.raises(ConfigError, match="'MambaForCausalLM' is not supported; known: LlamaForCausalLM"):
        registry.find(config)


def test_an_unknown_activation_is_refused():
    config = dataclasses.replace(ModelConfig.from_hf(HF), hidden_act="gelu")
    with pytest.raises(ConfigError, match="hidden_act 'gelu'"):
        registry.find(config)(config, dtype="float32", backend=xla.BACKEND)


def test_linear_scaling_divides_every_frequency():
    plain = rope.inverse_frequencies(64, 1e4, None)
    np.testing.assert_allclose(rope.inverse_frequencies(64, 1e4, LinearScaling(4.0)), plain / 4, rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    plain = rope.inverse_frequencies(64, 5e5, None)
    ratio = plain / rope.inverse_frequencies(64, 5e5, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    waves = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[waves < 8192 / 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[waves > 8192], 32, rtol=1e-5)
    between = (waves > 8192 / 4) & (waves < 8192)
    share = (8192 / waves[between] - 1) / 3
    np.testing.assert_allclose(1 / ratio[between], (1 - share) / 32 + share, rtol=1e-5)
    assert between.any()


def test_rotation_depends_on_distance_only():
    import jax.numpy as jnp

    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 16)).astype(np.float32)
    frequencies = rope.inverse_frequencies(16, 1e4, None)

    def score(at_q, at_k):
        turned = [rope.rotate(x, *rope.tables(jnp.array([at]), frequencies)) for x, at in ((q, at_q), (k, at_k))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(9, 5) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(9, 5) != pytest.approx(score(9, 6), abs=1e-2)
