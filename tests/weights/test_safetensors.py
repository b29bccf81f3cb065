import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pagedjax.core.errors import ConfigError
from pagedjax.weights.safetensors import INDEX, open_safetensors


def write_index(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_keep_their_dtype(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    save_file({"a": values}, tmp_path / "model.safetensors")
    read = open_safetensors(tmp_path).read("a")
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, values)


def test_only_the_shards_in_the_index_are_read(tmp_path):
    for name in ("one", "two", "stray"):
        save_file({name: np.ones(2, np.float32)}, tmp_path / f"{name}.safetensors")
    write_index(tmp_path, {"one": "one.safetensors", "two": "two.safetensors"})
    assert open_safetensors(tmp_path).names == {"one", "two"}


def test_a_missing_shard_is_named(tmp_path):
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors"})
    with pytest.raises(ConfigError, match="lacks model-00001-of-00002"):
        open_safetensors(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("one", "two"):
        save_file({"same": np.ones(2, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"same .*a second time"):
        open_safetensors(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 5}}', "[" * 100_000])
def test_an_index_of_another_form_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ConfigError, match="not an index"):
        open_safetensors(tmp_path)


def test_an_index_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / INDEX).mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*index"):
        open_safetensors(tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(100, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="cannot read"):
        open_safetensors(tmp_path)


def test_a_quantised_tensor_is_refused_by_name(tmp_path):
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ConfigError, match="tensor a is stored as F8_E4M3"):
        open_safetensors(tmp_path).read("a")
