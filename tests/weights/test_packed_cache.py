"""Packed weights come back from disk as they were packed, and a file that is damaged costs its time alone."""

import errno
import os

import jax
import numpy as np
import pytest
from flax import nnx

from pagedjax.weights import packed_cache
from pagedjax.weights.load import load_model
from pagedjax.weights.packed_cache import PackedCache, digest
from pallas_kernels.ragged_attention import xla


def load(path, directory, layout="int4"):
    """(the model's arrays, what was noted of its weights, what became of the cache)"""
    cache, noted = PackedCache(directory), []
    options = {"dtype": "float32", "backend": xla.BACKEND, "layout": layout, "note": noted.append}
    model = load_model(path, **options, cache=cache)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))], noted, cache.outcome


def check_equal(found, expected):
    for a, b in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[1] == expected[1]


@pytest.fixture
def refuse_packing(monkeypatch):
    """From its call on, nothing may be packed."""

    def refuse():
        def pack_for(*_, **__):
            return lambda parts, dtype: pytest.fail(f"{parts[0].name} was packed again")

        monkeypatch.setattr("pagedjax.weights.load.pack_for", pack_for)

    return refuse


@pytest.mark.parametrize("layout", ["int4", "int8", "packed_bf16"])
def test_a_second_load_packs_nothing_and_gives_the_same_model(tiny_hf, tmp_path, refuse_packing, layout):
    path = tiny_hf()
    first = load(path, tmp_path / "packed", layout)
    assert first[2] == "written"
    refuse_packing()
    second = load(path, tmp_path / "packed", layout)
    assert second[2] == "read"
    check_equal(second, first)


def test_each_layout_and_each_checkpoint_has_a_file_of_its_own(tiny_hf, tiny_gguf, tmp_path):
    outcomes = [
        load(path, tmp_path / "packed", layout)[2] for path in (tiny_hf(), tiny_gguf()) for layout in ("int4", "int8")
    ]
    assert outcomes == ["written"] * 4
    assert len(list((tmp_path / "packed").iterdir())) == 4


def test_another_version_of_the_packed_forms_is_packed_anew(tiny_hf, tmp_path, monkeypatch):
    path = tiny_hf()
    load(path, tmp_path / "packed")
    monkeypatch.setattr(packed_cache.packing, "VERSION", packed_cache.packing.VERSION + 1)
    assert load(path, tmp_path / "packed")[2] == "written"


def cut_off(contents):
    return contents[: len(contents) // 2]


def flip_a_weights_bit(contents):
    """In the middle of the data, which its checksum then contradicts."""
    middle = len(contents) // 2
    return contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]


@pytest.mark.parametrize("damage", [lambda _: b"", lambda _: b"no archive", cut_off, flip_a_weights_bit])
def test_a_damaged_file_is_packed_again_and_replaced(tiny_hf, tmp_path, damage):
    path = tiny_hf()
    first = load(path, tmp_path / "packed")
    (file,) = (tmp_path / "packed").iterdir()
    sound = file.read_bytes()
    file.write_bytes(damage(sound))
    second = load(path, tmp_path / "packed")
    assert second[2] == "written"
    check_equal(second, first)
    assert load(path, tmp_path / "packed")[2] == "read"
    assert list((tmp_path / "packed").iterdir()) == [file]


def test_a_full_disk_costs_no_more_than_the_next_starts_time(tiny_hf, tmp_path, monkeypatch):
    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed_cache.np, "savez", no_room)
    _, noted, outcome = load(tiny_hf(), tmp_path / "packed")
    assert outcome == "not written: No space left on device"
    assert noted
    assert list((tmp_path / "packed").iterdir()) == []


def test_plain_floats_are_not_kept(tiny_hf, tmp_path):
    assert load(tiny_hf(), tmp_path / "packed", "float")[2] == "unused"
    assert not (tmp_path / "packed").exists()


def test_the_digest_follows_the_contents_alone(tmp_path):
    one, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(b"weights")
    other.write_bytes(b"weights")
    assert digest(one) == digest(other)
    other.write_bytes(b"Weights")
    assert digest(one) != digest(other)
