"""Packed weights mean what GGUF's blocks mean, bit for bit."""

import gguf
import numpy as np
import pytest
from gguf import quants

from pallas_kernels import native
from pallas_kernels.matmul import pack_quantised, packing, preferred, take_rows
from pallas_kernels.matmul.packing import QuantisedRows

SIZES = packing.BLOCK_BYTES


def random_blocks(encoding: str, num_out: int, num_in: int, seed: int = 0) -> QuantisedRows:
    """Blocks of every digit; scales and minima are ordinary, subnormal, negative and zero."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_out, num_in // 32, SIZES[encoding]), np.uint8)
    for at in range(2 if encoding == "Q4_1" else 1):
        halves = rng.standard_normal(blocks.shape[:2]).astype(np.float16)
        halves.flat[:4] = [0, 6e-8, -1e-6, 1000]
        blocks[..., 2 * at : 2 * at + 2] = halves[..., None].view(np.uint8)
    return QuantisedRows(encoding, blocks)


def dequantised_by_gguf(rows: QuantisedRows) -> np.ndarray:
    raw = rows.blocks.reshape(len(rows.blocks), -1)
    return quants.dequantize(raw, gguf.GGMLQuantizationType[rows.encoding])


@pytest.mark.parametrize("encoding", SIZES)
def test_blocks_mean_what_the_gguf_package_says(encoding):
    rows = random_blocks(encoding, 40, 96)
    np.testing.assert_array_equal(packing.dequantise(rows), dequantised_by_gguf(rows))


@pytest.mark.skipif(native.unavailable() is not None, reason="rows are taken by the native kernels")
@pytest.mark.parametrize("encoding", SIZES)
@pytest.mark.parametrize("num_out", [16, 40])
def test_packing_loses_nothing(encoding, num_out):
    rows = random_blocks(encoding, num_out, 96)
    packed = pack_quantised([rows])
    np.testing.assert_array_equal(take_rows(packed, np.arange(num_out)), dequantised_by_gguf(rows))


@pytest.mark.skipif(native.unavailable() is not None, reason="rows are taken by the native kernels")
def test_parts_of_both_four_bit_encodings_are_stacked():
    parts = [random_blocks("Q4_0", 24, 64), random_blocks("Q4_1", 8, 64, seed=1)]
    expected = np.concatenate([dequantised_by_gguf(part) for part in parts])
    np.testing.assert_array_equal(take_rows(pack_quantised(parts), np.arange(32)), expected)


def test_encodings_that_do_not_go_together_are_left_to_the_caller():
    assert pack_quantised([random_blocks("Q4_0", 16, 32), random_blocks("Q8_0", 16, 32)]) is None


@pytest.mark.parametrize(
    ("quantise", "steps"), [(packing.quantise_nibbles, 15), (packing.quantise_bytes, 254)], ids=["nibbles", "bytes"]
)
def test_quantising_is_wrong_by_little_more_than_half_a_step(quantise, steps):
    weight = np.random.default_rng(0).standard_normal((20, 64)).astype(np.float32)
    weight[3] = 0
    weight[4] = 2.5
    groups = weight.reshape(20, 2, 32)
    spread = groups.max(-1) - groups.min(-1) if steps == 15 else 2 * np.abs(groups).max(-1)
    # The scale is rounded to float16, which moves the last step by half a percent of itself at most.
    allowed = np.repeat(0.5 * spread / steps * 1.02 + np.abs(groups).max(-1) * 1e-3, 32).reshape(20, 64)
    assert np.all(np.abs(packing.dequantise(quantise(weight)) - weight) <= allowed)


def test_bfloat16_pairs_of_sixteen_outputs_lie_together():
    weight = np.arange(20 * 6, dtype=np.float32).reshape(20, 6)
    packed = packing.pack_bf16(weight)
    assert packed.shape == (2, 3, 16, 2)
    as_floats = (packed.astype(np.uint32) << 16).view(np.float32)
    assert as_floats[1, 2, 3].tolist() == [weight[19, 4], weight[19, 5]]
    assert not as_floats[1, :, 4:].any()


def test_a_layout_that_rounds_is_never_chosen_for_float32():
    choice = preferred("float32", not_grouped="float32 is asked for")
    assert choice.name == "float"
    assert set(choice.refused) == {"grouped", "packed_bf16", "int8_rows"}


@pytest.mark.skipif(native.unavailable() is not None, reason="there are no native kernels")
@pytest.mark.parametrize(("reason", "name"), [(None, "grouped"), ("there are none", "packed_bf16")])
def test_native_layouts_are_chosen_for_bfloat16(reason, name):
    assert preferred("bfloat16", not_grouped=reason).name == name


def test_without_native_kernels_the_reason_is_passed_on(monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: "no compiler")
    choice = preferred("bfloat16", not_grouped="there are none")
    assert choice.name == "float"
    assert choice.refused["packed_bf16"] == "it needs the native kernels: no compiler"
