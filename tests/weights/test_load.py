import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from pagedjax.core.errors import ConfigError
from pagedjax.models.config import LinearScaling, Llama3Scaling, ModelConfig
from pagedjax.models.rope import inverse_frequencies
from pagedjax.weights.load import load_model, open_checkpoint
from pallas_kernels.ragged_attention import xla

LLAMA31 = Llama3Scaling(8.0, 1.0, 4.0, 8192)
THETA = 500_000.0


def rope_factors(scaling, head_dim=8):
    plain = inverse_frequencies(head_dim, THETA, None)
    return (plain / inverse_frequencies(head_dim, THETA, scaling)).astype(np.float32)


def test_config_of_a_gguf_file(tiny_gguf):
    with open_checkpoint(tiny_gguf()) as checkpoint:
        assert checkpoint.config == ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=40,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            rms_norm_eps=float(np.float32(1e-5)),
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_and_a_directory_of_one_model_are_equal(tiny_gguf, tiny_hf, tied):
    with open_checkpoint(tiny_gguf(tied=tied)) as ours, open_checkpoint(tiny_hf(tied=tied)) as theirs:
        assert ours.config == theirs.config
        assert ours.names == theirs.names
        for name in theirs.names:
            np.testing.assert_array_equal(ours.get(name), theirs.get(name), err_msg=name)


def test_models_loaded_from_both_have_equal_parameters_in_the_dtype_asked_for(tiny_gguf, tiny_hf):
    models = [load_model(p, dtype="bfloat16", backend=xla.BACKEND) for p in (tiny_gguf(), tiny_hf())]
    ours, theirs = (jax.tree.leaves(nnx.state(model, nnx.Param)) for model in models)
    assert len(ours) == len(theirs) > 10
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert "bfloat16" in {leaf.dtype.name for leaf in ours}


def test_an_unknown_dtype_is_refused(tiny_gguf):
    with pytest.raises(ConfigError, match="--dtype"):
        load_model(tiny_gguf(), dtype="int3", backend=xla.BACKEND)


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.sliding_window": 16}, "sliding window"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.attention.key_length": "eight"}, "key_length"),
        ({"tokenizer.ggml.tokens": ["t"] * 41}, "41 tokens"),
    ],
)
def test_what_a_llama_gguf_may_not_have_is_named(tiny_gguf, metadata, complaint):
    with pytest.raises(ConfigError, match=complaint):
        open_checkpoint(tiny_gguf(metadata=metadata))


def test_another_architecture_is_named(tiny_gguf):
    with pytest.raises(ConfigError, match="'gemma'"):
        open_checkpoint(tiny_gguf(architecture="gemma"))


def test_llama_3_scaling_is_recovered_from_the_stored_factors(tiny_gguf):
    path = tiny_gguf(theta=THETA, tensors={"rope_freqs.weight": rope_factors(LLAMA31)})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.rope_scaling == LLAMA31
        assert "rope_freqs.weight" not in checkpoint.names


def test_rotary_factors_of_another_kind_are_refused(tiny_gguf):
    odd = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    with pytest.raises(ConfigError, match="not Llama 3's"):
        open_checkpoint(tiny_gguf(tensors={"rope_freqs.weight": odd}))


def test_linear_scaling_is_read(tiny_gguf):
    path = tiny_gguf(metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert open_checkpoint(path).config.rope_scaling == LinearScaling(4.0)


def test_a_surplus_gguf_tensor_is_named(tiny_gguf):
    path = tiny_gguf(tensors={"blk.0.extra.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(ConfigError, match=r"blk\.0\.extra\.weight"):
        load_model(path, dtype="float32", backend=xla.BACKEND)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_object_is_refused(tiny_hf, text):
    directory = tiny_hf()
    (directory / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_checkpoint(directory)


def test_a_missing_tensor_is_named(tiny_hf):
    directory = tiny_hf()
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(directory, dtype="float32", backend=xla.BACKEND)
