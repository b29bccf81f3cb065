"""Directories of AWQ and GPTQ, written here from random numbers, beside the plain model of the same values."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedjax.core.errors import ConfigError
from pagedjax.core.request import SamplingParams
from pagedjax.engine.quantisation import choose_layout
from pagedjax.llm import LLM
from pagedjax.weights import int4
from pagedjax.weights.load import load_model, open_checkpoint
from pallas_kernels import native
from pallas_kernels.matmul import FloatWeight, Grouped4, packing
from pallas_kernels.quant_matmul import Int4Weight
from pallas_kernels.ragged_attention import xla
from tests.models.tiny import Stepper, numpy_logits
from tests.pallas_kernels.quant_checkpoints import awq_tensors, gptq_tensors, make_quantised

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
ORDERED = GPTQ | {"desc_act": True}
NEW_GPTQ = GPTQ | {"checkpoint_format": "gptq_v2"}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
IDS = np.arange(12) * 7 % 40
needs_native = pytest.mark.skipif(native.unavailable() is not None, reason="needs the native kernels")


@pytest.fixture
def quantised_hf(tiny_hf):
    """Writes the tiny model quantised: `quantised_hf(quantization_config)` gives (directory, its tensors' values)."""

    def write(stated, *, keep=(), extra=None):
        directory = tiny_hf(tied=False, quantization_config=stated)
        plain = load_file(directory / "model.safetensors")
        stored, values, rng = {}, dict(plain), np.random.default_rng(1)
        # Every weight of 64 inputs gets one order, as the inputs that quantisers go by are shared.
        orders = {size: rng.permutation(np.repeat(np.arange(size // 32), 32)) for size in (32, 64)}
        for name, value in plain.items():
            if "_proj" not in name or any(kept in name for kept in keep):
                stored[name] = value
                continue
            stem, (num_out, num_in) = name.removesuffix("weight"), value.shape
            made = make_quantised(rng, num_in, num_out, 32)
            made = made._replace(
                scales=(made.scales / 16).astype(np.float16),
                zeros=np.maximum(made.zeros, 1),
                groups=orders[num_in] if stated.get("desc_act") else made.groups,
            )
            if stated["quant_method"] == "awq":
                tensors = awq_tensors(made)
            else:
                tensors = gptq_tensors(made, less_one=stated.get("checkpoint_format") != "gptq_v2")
            stored |= {f"{stem}{part}": tensor for part, tensor in tensors.items()}
            values[name] = np.ascontiguousarray(made.values, np.float32)
        save_file(stored | (extra or {}), directory / "model.safetensors")
        return directory, values

    return write


def logits(model):
    return Stepper(model, model_caches(model), [IDS]).step([(0, 0, 12)])[0]


def model_caches(model):
    config = model.config
    cache = xla.BACKEND.init_cache(32, 8, config.num_kv_heads, config.head_dim, jnp.float32, num_layers=1)
    return tuple(jax.tree.map(jnp.copy, cache) for _ in range(config.num_layers))


def kinds(model):
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {type(var.get_value()) for path, var in state if "proj" in ".".join(map(str, path))}


@pytest.mark.parametrize("stated", [AWQ, GPTQ, ORDERED, NEW_GPTQ], ids=["awq", "gptq", "act-order", "gptq_v2"])
def test_every_tensor_has_the_values_that_were_quantised(quantised_hf, stated):
    directory, values = quantised_hf(stated)
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.names == set(values)
        for name, value in values.items():
            np.testing.assert_allclose(checkpoint.get(name), value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("stated", [AWQ, ORDERED], ids=["awq", "act-order"])
def test_a_quantised_directory_computes_as_its_values_do(quantised_hf, stated):
    directory, values = quantised_hf(stated)
    model = load_model(directory, dtype="float32", backend=xla.BACKEND, layout="w4a16")
    assert kinds(model) == {Int4Weight}
    np.testing.assert_allclose(logits(model), numpy_logits(model.config, values, IDS), rtol=1e-3, atol=1e-3)


def test_it_can_be_dequantised_as_it_is_loaded(quantised_hf):
    directory, _ = quantised_hf(ORDERED)
    assert kinds(load_model(directory, dtype="float32", backend=xla.BACKEND)) == {FloatWeight}


@needs_native
def test_native_kernels_take_its_groups_with_minima_in_float16(quantised_hf):
    directory, values = quantised_hf(AWQ)
    assert kinds(load_model(directory, dtype="float32", backend=xla.BACKEND, layout="grouped")) == {Grouped4}
    name = "model.layers.0.mlp.down_proj.weight"
    with open_checkpoint(directory) as checkpoint:
        rows, tensor = checkpoint.get_quantised(name), checkpoint.get_int4(name)
    step = tensor.scales.astype(np.float32).max()
    np.testing.assert_allclose(packing.dequantise(rows), values[name], atol=step / 100)


def test_a_product_of_which_a_part_is_plain_is_floats(quantised_hf):
    directory, _ = quantised_hf(AWQ, keep=("k_proj",))
    model = load_model(directory, dtype="float32", backend=xla.BACKEND, layout="w4a16")
    assert isinstance(model.layers[0].self_attn.qkv_proj.weight.get_value(), FloatWeight)
    assert isinstance(model.layers[0].mlp.down_proj.weight.get_value(), Int4Weight)


def test_a_bias_of_zeros_that_the_model_lacks_is_left_out_and_another_is_refused(quantised_hf):
    bias = "model.layers.0.self_attn.q_proj.bias"
    directory, _ = quantised_hf(AWQ, extra={bias: np.zeros(32, np.float16)})
    load_model(directory, dtype="float32", backend=xla.BACKEND, layout="w4a16")
    stored = load_file(directory / "model.safetensors") | {bias: np.ones(32, np.float16)}
    save_file(stored, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"q_proj\.bias"):
        load_model(directory, dtype="float32", backend=xla.BACKEND, layout="w4a16")


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization by 'bitsandbytes' is not supported"),
        (AWQ | {"bits": 8}, "awq with bits 8"),
        (AWQ | {"version": "GEMV"}, "awq with version 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (AWQ | {"group_size": 48}, "group_size 48"),
        (GPTQ | {"bits": 3}, "gptq with bits 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"layers": {}}}, "dynamic"),
        ("awq", "must be an object"),
    ],
)
def test_other_kinds_are_refused_by_name(stated, complaint):
    with pytest.raises(ConfigError, match=complaint):
        int4.read_scheme({"quantization_config": stated})


def test_one_group_for_all_inputs_is_known_by_its_size():
    assert int4.read_scheme({"quantization_config": AWQ | {"group_size": -1}}) == int4.Scheme("AWQ4", None)
    assert int4.read_scheme({}) is None


@pytest.mark.parametrize(
    ("stated", "says"), [(AWQ | {"group_size": 64}, "groups of its"), (ORDERED | {"desc_act": False}, "act-order")]
)
def test_tensors_that_contradict_the_config_are_refused(quantised_hf, stated, says):
    directory, _ = quantised_hf(ORDERED if "desc_act" in stated else AWQ)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with pytest.raises(ConfigError, match=says):
        load_model(directory, dtype="float32", backend=xla.BACKEND, layout="w4a16")


def test_a_weight_without_its_scales_is_named(quantised_hf):
    directory, _ = quantised_hf(AWQ)
    stored = load_file(directory / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.scales"]
    save_file(stored, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no model\.layers\.1\.mlp\.up_proj\.scales"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("missing", "quantization", "encoding", "layout"),
    [
        (None, "auto", "AWQ4", "grouped"),
        (None, "auto", "GPTQ4 in act-order", "w4a16"),
        ("no compiler", "auto", "GPTQ4", "w4a16"),
        (None, "none", "AWQ4", "packed_bf16"),
        ("no compiler", "none", "AWQ4", "float"),
    ],
)
def test_its_layout_follows_the_machine_and_what_was_asked(monkeypatch, missing, quantization, encoding, layout):
    monkeypatch.setattr(native, "unavailable", lambda: missing)
    choice = choose_layout(quantization, asked_dtype="auto", dtype=jnp.bfloat16, encodings={"F16", encoding})
    assert choice.layout == layout
    assert choice.reason


def test_a_quantised_directory_generates_as_its_dequantised_self(quantised_hf):
    directory, _ = quantised_hf(ORDERED)
    letters = Tokenizer(models.BPE({chr(ord("A") + i): i for i in range(40)}, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters.save(str(directory / "tokenizer.json"))
    said = []
    for quantization in ("auto", "none"):
        limits = {"max_model_len": 32, "max_num_batched_tokens": 16, "max_num_seqs": 1, "num_gpu_blocks_override": 8}
        llm = LLM(str(directory), dtype="float32", quantization=quantization, **limits)
        said.append(llm.generate("DGA", GREEDY)[0].outputs[0].token_ids)
    assert said[0] == said[1] and len(said[0]) == 8
