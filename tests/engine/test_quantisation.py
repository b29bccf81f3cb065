"""How weights are kept: what was asked for, what the file holds and what the machine can do decide, and say why."""

import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.engine.quantisation import choose_layout
from pallas_kernels import native

QUANTISED, FLOATS = ["F32", "Q4_1", "Q8_0"], ["F32", "BF16"]


@pytest.fixture(params=[None, "no compiler"], ids=["native", "xla"])
def missing(request, monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: request.param)
    return request.param


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


def test_without_native_kernels_weights_are_floats_and_the_reason_is_theirs(monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: "no compiler")
    choice = choose()
    assert choice.layout == "float"
    assert "no compiler" in choice.reason


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_quantising_is_done_where_it_can_be_and_refused_elsewhere(missing, quantization, dtype):
    if missing is None:
        assert choose(quantization, asked=dtype, encodings=FLOATS).layout == quantization
        return
    with pytest.raises(
        ConfigError, match=rf"{quantization} needs the native kernels: no compiler.*--quantization none"
    ):
        choose(quantization, asked=dtype)


def test_a_variable_of_the_environment_that_means_nothing_is_refused(monkeypatch):
    def refuse():
        raise ValueError("PAGEDJAX_NATIVE=mmx is none of off")

    monkeypatch.setattr(native, "unavailable", refuse)
    with pytest.raises(ConfigError, match="PAGEDJAX_NATIVE=mmx"):
        choose()
