"""Which form each weight gets, and what rounding to groups costs."""

import gguf
import jax
import numpy as np
import pytest
from flax import nnx

from pagedjax.core.errors import ConfigError
from pagedjax.models.fill import Part
from pagedjax.runtime.programs import split_model
from pagedjax.weights.load import load_model
from pagedjax.weights.pack import choose_form, describe, pack_for
from pallas_kernels import native
from pallas_kernels.matmul import FloatWeight, Grouped4, Grouped8, Int8Rows, PackedBf16, packing, take_rows
from pallas_kernels.ragged_attention import xla

EMBEDDING = "model.embed_tokens.weight"
needs_native = pytest.mark.skipif(native.unavailable() is not None, reason="it takes the native kernels")


def make_parts(*encodings, num_in=64, name="x"):
    return tuple(Part(f"{name}{i or ''}", (24, num_in)) for i in range(len(encodings)))


def form_of(layout, *encodings, name="x"):
    return choose_form(layout, make_parts(*encodings, name=name), encodings)


def packed_by(layout, values, encodings, get_quantised=lambda name: None, name="x"):
    """(the packed weight, what was noted) of one product with these parts' values."""
    parts = make_parts(*encodings, num_in=values.shape[1], name=name)
    noted = []
    stored = {part.name: encoding for part, encoding in zip(parts, encodings)}
    pack = pack_for(lambda name: values, get_quantised, stored, layout, note=noted.append)
    return pack(parts, np.float32), noted


def make_values(num_in=64):
    return np.random.default_rng(0).standard_normal((24, num_in), np.float32)


@pytest.mark.parametrize(
    ("encodings", "form"),
    [
        (("Q4_0", "Q4_1"), "4 bits"),
        (("Q8_0",), "8 bits"),
        (("Q4_K", "Q4_K", "Q6_K"), "8 bits"),
        (("Q5_1",), "8 bits"),
        (("Q4_1", "Q8_0"), "8 bits"),
        (("F16",), "bfloat16"),
        (("Q4_1", "F32"), "bfloat16"),
    ],
)
def test_grouped_keeps_what_it_can_and_is_finer_elsewhere(encodings, form):
    assert form_of("grouped", *encodings) == form


@pytest.mark.parametrize(
    ("layout", "encoding", "name", "form"),
    [
        ("int8", "BF16", "x", "8 bits"),
        ("int8", "BF16", EMBEDDING, "bfloat16"),
        ("int8", "Q8_0", EMBEDDING, "8 bits"),
        ("int4", "BF16", "x", "4 bits"),
        ("int4", "BF16", "lm_head.weight", "8 bits"),
        ("packed_bf16", "Q4_1", "x", "bfloat16"),
        ("int8_rows", "Q4_1", "x", "rows of 8 bits"),
        ("int8_rows", "BF16", "x", "rows of 8 bits"),
        ("int8_rows", "Q8_0", EMBEDDING, "floats"),
    ],
)
def test_embeddings_and_the_head_are_kept_finer(layout, encoding, name, form):
    assert form_of(layout, encoding, name=name) == form


@needs_native
@pytest.mark.parametrize(("layout", "kind", "steps"), [("int8", Grouped8, 254), ("int4", Grouped4, 15)])
def test_quantising_is_wrong_by_little_more_than_half_a_step_of_its_group(layout, kind, steps):
    values = make_values()
    packed, (noted,) = packed_by(layout, values, ["F32"])
    assert isinstance(packed, kind)
    groups = values.reshape(24, 2, 32)
    spread = groups.max(-1) - groups.min(-1) if layout == "int4" else 2 * np.abs(groups).max(-1)
    allowed = np.repeat(0.5 * spread / steps * 1.02 + np.abs(groups).max(-1) * 1e-3, 32).reshape(24, 64)
    wrong = np.abs(np.asarray(take_rows(packed, np.arange(24))) - values)
    assert np.all(wrong <= allowed)
    sampled = slice(None, None, 16)
    measured = np.sqrt((wrong[sampled] ** 2).sum() / (values[sampled] ** 2).sum())
    assert np.sqrt(noted.squared_error / noted.squared) == pytest.approx(measured, rel=1e-3)


@needs_native
def test_large_weights_are_quantised_in_pieces_to_the_same(monkeypatch):
    whole, _ = packed_by("int8", make_values(), ["F32"])
    monkeypatch.setattr("pagedjax.weights.pack.PIECE_ELEMENTS", 16 * 64)
    in_pieces, _ = packed_by("int8", make_values(), ["F32"])
    np.testing.assert_array_equal(whole.data, in_pieces.data)


def test_what_the_file_holds_in_the_right_groups_is_not_rounded_again():
    stored = packing.quantise_bytes(make_values())
    packed, noted = packed_by("int8", make_values() + 1, ["Q8_0"], lambda name: stored)
    np.testing.assert_array_equal(packed.data, packing.pack_bytes([stored]))
    assert describe(noted) == "0.0M Q8_0 in 8 bits"


def test_the_error_of_a_conversion_is_told():
    _, noted = packed_by("grouped", make_values(), ["Q4_K", "Q6_K"])
    assert describe(noted).startswith("0.0M Q4_K+Q6_K in 8 bits, error 0.")


@pytest.mark.parametrize("layout", ["int8", "int4"])
def test_rows_that_are_no_whole_groups_are_refused_by_name(layout):
    with pytest.raises(ConfigError, match=r"x has 40 inputs.*--quantization none"):
        packed_by(layout, make_values(40), ["F32"])


def kinds_of(model):
    values = (variable.get_value() for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)))
    return {type(value) for value in values if not isinstance(value, jax.Array)}


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("int8", {Grouped8, PackedBf16}),
        ("int4", {Grouped4, Grouped8}),
        ("packed_bf16", {PackedBf16}),
        ("int8_rows", {Int8Rows, FloatWeight}),
    ],
)
def test_any_model_is_quantised_as_it_is_loaded(tiny_hf, layout, kinds):
    noted = []
    model = load_model(tiny_hf(), dtype="float32", backend=xla.BACKEND, layout=layout, note=noted.append)
    assert kinds_of(model) == kinds
    assert len(noted) == 2 * 4 + (layout != "int8_rows")


@needs_native
@pytest.mark.parametrize("layout", ["int4", "packed_bf16"])
def test_packed_weights_are_one_leaf_in_their_order_of_use(tiny_hf, layout):
    model = load_model(tiny_hf(), dtype="float32", backend=xla.BACKEND, layout=layout)
    layers = [(x.self_attn.qkv_proj, x.self_attn.o_proj, x.mlp.gate_up_proj, x.mlp.down_proj) for x in model.layers]
    used = [product.weight.get_value() for product in [*sum(layers, ()), model.embed_tokens]]
    offsets = [weight.offset for weight in used]
    assert offsets == sorted(offsets)
    hidden, num_norms = jax.ShapeDtypeStruct((1, model.config.hidden_size), np.float32), 2 * len(layers) + 1
    for embeds, num_vectors in ((False, num_norms), (True, 0)):
        parts = split_model(model, hidden, embeds=embeds)
        assert len(parts.forward_leaves) == len(parts.names) == 1 + num_vectors
        assert [id(leaf) for leaf in parts.head_leaves] == [id(used[0].data)]


def test_rows_of_8_bits_share_their_scales(tiny_hf):
    model = load_model(tiny_hf(), dtype="float32", backend=xla.BACKEND, layout="int8_rows")
    parts = split_model(model, jax.ShapeDtypeStruct((1, model.config.hidden_size), np.float32))
    num_layers = len(model.layers)
    products, norms, scales, embedding = 4 * num_layers, 2 * num_layers + 1, 1, 1
    assert len(parts.forward_leaves) == products + norms + scales + embedding


def test_the_error_of_rows_is_told():
    values = make_values()
    packed, (noted,) = packed_by("int8_rows", values, ["BF16"])
    assert noted.num_weights == values.size
    sampled = slice(None, None, 16)
    wrong = (np.asarray(take_rows(packed, np.arange(24))) - values)[sampled]
    assert noted.squared_error == pytest.approx((wrong**2).sum(), rel=1e-3)
    assert noted.squared == pytest.approx((values[sampled] ** 2).sum(), rel=1e-6)


@needs_native
def test_five_bits_become_eight_that_hardly_differ(tensor_gguf):
    from pagedjax.weights.gguf import open_gguf

    raw = gguf.quantize(make_values(), gguf.GGMLQuantizationType.Q5_0)
    file = open_gguf(tensor_gguf(raw, gguf.GGMLQuantizationType.Q5_0))
    values = file.read("x")
    packed, (noted,) = packed_by("grouped", values, ["Q5_0"], file.read_quantised)
    assert isinstance(packed, Grouped8)
    assert np.sqrt(noted.squared_error / noted.squared) < 0.01
    np.testing.assert_allclose(take_rows(packed, np.arange(24)), values, atol=np.abs(values).max() / 200)
