"""How weights are kept: what was asked for, what the file holds and what the machine can do decide, and say why."""

import jax
import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.engine.quantisation import choose_layout
from pallas_kernels import native

QUANTISED, FLOATS = ["F32", "Q4_1", "Q8_0"], ["F32", "BF16"]


@pytest.fixture
def with_native(monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: None)


def choose(quantization="auto", asked="auto", dtype="bfloat16", encodings=QUANTISED):
    return choose_layout(quantization, asked_dtype=asked, dtype=dtype, encodings=encodings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_quantised_file_stays_so_where_nothing_is_asked_for(with_native, dtype):
    choice = choose(dtype=dtype)
    assert choice.layout == "grouped"
    assert choice.reason == "the checkpoint is quantised (Q4_1, Q8_0)"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_is_asked_for_is_kept(with_native, dtype):
    choice = choose(asked=dtype, dtype=dtype)
    assert choice.layout == ("packed_bf16" if dtype == "bfloat16" else "float")
    assert choice.refused["grouped"] == f"dtype {dtype} is asked for"


@pytest.mark.parametrize(("quantization", "encodings"), [("none", QUANTISED), ("auto", FLOATS), ("none", FLOATS)])
def test_weights_are_bfloat16_where_there_are_no_groups_to_keep(with_native, quantization, encodings):
    choice = choose(quantization, encodings=encodings)
    assert choice.layout == "packed_bf16"
    expected = "quantization none is asked for" if encodings is QUANTISED else "the checkpoint is not quantised"
    assert choice.reason == expected


@pytest.fixture
def on_xla(monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: "no compiler")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))


def test_without_native_kernels_a_quantised_file_becomes_rows_of_8_bits(on_xla):
    choice = choose()
    assert choice.layout == "int8_rows"
    assert choice.reason == "the checkpoint is quantised (Q4_1, Q8_0)"
    assert "no compiler" in choice.refused["grouped"]


@pytest.mark.parametrize(
    ("options", "against"),
    [
        ({"encodings": FLOATS}, "the checkpoint is not quantised"),
        ({"asked": "bfloat16"}, "dtype bfloat16 is asked for"),
        ({"quantization": "none"}, "quantization none is asked for"),
    ],
)
def test_without_native_kernels_other_weights_are_floats_and_the_reason_is_theirs(on_xla, options, against):
    choice = choose(**options)
    assert choice.layout == "float"
    assert "no compiler" in choice.reason
    assert choice.refused["int8_rows"] == against


@pytest.mark.parametrize(
    ("platform", "version", "against"),
    [("gpu", (0, 11, 2), "this is gpu"), ("cpu", (0, 10, 2), "multiplies integers more slowly")],
)
def test_there_are_no_rows_of_8_bits_where_they_would_be_slow(on_xla, monkeypatch, platform, version, against):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "__version_info__", version)
    choice = choose()
    assert choice.layout == "float"
    assert against in choice.refused["int8_rows"]
    with pytest.raises(ConfigError, match=rf"int8 cannot be had: it needs the native kernels: no compiler.*{against}"):
        choose("int8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_quantising_is_done_where_native_kernels_are(with_native, quantization, dtype):
    assert choose(quantization, asked=dtype, encodings=FLOATS).layout == quantization


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_without_native_kernels_there_are_8_bits_and_not_4(on_xla, dtype):
    assert choose("int8", asked=dtype, encodings=FLOATS).layout == "int8_rows"
    with pytest.raises(
        ConfigError, match=r"int4 cannot be had: it needs.*no compiler; set --quantization int8 or none"
    ):
        choose("int4", asked=dtype)


def test_a_variable_of_the_environment_that_means_nothing_is_refused(monkeypatch):
    def refuse():
        raise ValueError("PAGEDJAX_NATIVE=mmx is none of off")

    monkeypatch.setattr(native, "unavailable", refuse)
    with pytest.raises(ConfigError, match="PAGEDJAX_NATIVE=mmx"):
        choose()
