import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedjax.core.errors import ConfigError
from pagedjax.weights.gguf import open_gguf

WRITABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("encoding", WRITABLE)
def test_values_are_those_that_were_quantised(tensor_gguf, encoding):
    kind = GGMLQuantizationType[encoding]
    values = np.random.default_rng(1).standard_normal((6, 256), np.float32)
    raw = quants.quantize(values, kind)
    read = open_gguf(tensor_gguf(raw, kind)).read("x").astype(np.float32)
    np.testing.assert_array_equal(read, quants.dequantize(raw, kind))
    assert np.abs(read - values).max() < 0.5


@pytest.mark.parametrize("encoding", K_QUANTS)
def test_k_quants_read_as_the_package_dequantises_them(tensor_gguf, encoding):
    kind = GGMLQuantizationType[encoding]
    _, num_bytes = quants.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(2).integers(0, 60, (3, 2 * num_bytes), np.uint8)
    read = open_gguf(tensor_gguf(raw, kind)).read("x")
    assert read.shape == (3, 512)
    np.testing.assert_array_equal(read, quants.dequantize(raw, kind))


def test_a_large_tensor_read_in_pieces_is_whole(tensor_gguf, monkeypatch):
    monkeypatch.setattr("pagedjax.weights.gguf.PIECE_ELEMENTS", 3 * 64)
    raw = quants.quantize(np.random.default_rng(3).standard_normal((10, 64), np.float32), GGMLQuantizationType.Q8_0)
    read = open_gguf(tensor_gguf(raw, GGMLQuantizationType.Q8_0)).read("x")
    np.testing.assert_array_equal(read, quants.dequantize(raw, GGMLQuantizationType.Q8_0))


def test_float32_is_a_view_of_the_file(tensor_gguf):
    read = open_gguf(tensor_gguf(np.ones((2, 4), np.float32), GGMLQuantizationType.F32)).read("x")
    assert not read.flags.owndata
    assert not read.flags.writeable


def test_metadata_equals_what_the_gguf_package_reads(tmp_path):
    path = tmp_path / "meta.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(["a", "é", "🙂", ""])
    writer.add_token_types([1, 3, 1, 1])
    writer.add_token_scores([0.5, -1.25, 0.0, 3.0])
    writer.add_add_bos_token(True)
    writer.add_key_value("far", 2**40, GGUFValueType.UINT64)
    writer.add_key_value("below", -5, GGUFValueType.INT8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    theirs = {k: f.contents() for k, f in GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    assert open_gguf(path).metadata == theirs


def test_an_encoding_that_cannot_be_read_is_named(tensor_gguf):
    raw = np.zeros((2, 64), np.int8)
    with pytest.raises(ConfigError, match="stored as I8"):
        open_gguf(tensor_gguf(raw, GGMLQuantizationType.I8)).read("x")


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(100), "version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(100), "big-endian"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 100, "truncated or corrupt"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, contents, complaint):
    path = tmp_path / "odd.gguf"
    path.write_bytes(contents)
    with pytest.raises(ConfigError, match=complaint):
        open_gguf(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        open_gguf(tmp_path / "nowhere.gguf")


def test_a_truncated_file_is_refused_wherever_it_ends(tiny_gguf):
    path = tiny_gguf()
    whole = path.read_bytes()
    for length in [*range(0, 3000, 37), len(whole) // 2, len(whole) - 40]:
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"truncated|only \d+ bytes"):
            open_gguf(path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(position=st.integers(0, 2500), value=st.integers(0, 255))
def test_one_wrong_byte_in_the_header_never_escapes_as_another_error(tiny_gguf, position, value):
    path = tiny_gguf(metadata={"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.token_type": [1, 1, 1]})
    contents = bytearray(path.read_bytes())
    contents[position] = value
    path.write_bytes(contents)
    try:
        file = open_gguf(path)
    except ConfigError:
        return
    for info in file.tensors.values():
        assert info.start + info.num_bytes <= len(contents)
