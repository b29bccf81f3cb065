"""Numbers into the packed forms of native/gemm.h, in numpy: from floats, and from GGUF's quantised blocks bit for bit.

A packed weight has blocks of 16 outputs along axis 0; outputs past the last are zeros. GGUF's blocks hold 32 inputs of
one output: Q4_0 (float16 scale d; value d * (q - 8)), Q4_1 (d, minimum m; d * q + m), Q8_0 (d; d * q).
"""

from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

# Of the packed forms, how floats are rounded to them, and the files that keep them: to be raised with any change.
VERSION = 2
LANES = 16
GROUP = 32
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
FOUR_BITS = ("Q4_0", "Q4_1")


class QuantisedRows(NamedTuple):
    """Rows of a weight as GGUF keeps them: blocks [rows, in / 32, bytes of `encoding`], uint8."""

    encoding: str
    blocks: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight, [out, in]."""
        return self.blocks.shape[0], self.blocks.shape[1] * GROUP


def pack_bf16(weight: np.ndarray) -> np.ndarray:
    """[out, in] of any float type: the bits [out / 16, in / 2, 16, 2], uint16."""
    bits = weight.astype(ml_dtypes.bfloat16, copy=False).view(np.uint16)
    padded = _padded(np.pad(bits, ((0, 0), (0, bits.shape[1] % 2))))
    return np.ascontiguousarray(padded.reshape(-1, LANES, padded.shape[1] // 2, 2).swapaxes(1, 2))


def pack_nibbles(parts: Sequence[QuantisedRows]) -> np.ndarray:
    """Q4_0 and Q4_1, stacked: [out / 16, in / 32, 320], uint8."""
    scales, minima, quants = (_padded(np.concatenate(x)) for x in zip(*map(_four_bits, parts)))
    # [blocks, lanes, groups, j, low or high, 4 inputs] -> [blocks, groups, j, lanes, 4 inputs], low and high in a byte
    split = quants.reshape(-1, LANES, quants.shape[1], 4, 2, 4)
    both = split[:, :, :, :, 0] | split[:, :, :, :, 1] << 4
    digits = both.transpose(0, 2, 3, 1, 4).reshape(both.shape[0], both.shape[2], 256)
    return np.concatenate([digits, _by_lane(scales), _by_lane(minima)], axis=-1)


def pack_bytes(parts: Sequence[QuantisedRows]) -> np.ndarray:
    """Q8_0, stacked: [out / 16, in / 32, 544], uint8."""
    blocks = _padded(np.concatenate([part.blocks for part in parts]))
    scales = blocks[..., :2].copy().view(np.float16)[..., 0]
    quants = blocks[..., 2:] ^ 0x80  # q + 128
    digits = quants.reshape(-1, LANES, quants.shape[1], 8, 4).transpose(0, 2, 3, 1, 4)
    return np.concatenate([digits.reshape(*digits.shape[:2], 512), _by_lane(scales)], axis=-1)


def quantise_bytes(weight: np.ndarray) -> QuantisedRows:
    """[out, in], in a multiple of 32, rounded to Q8_0."""
    groups = _groups(weight)
    scales = (np.abs(groups).max(-1) / 127).astype(np.float16)
    quants = np.rint(groups * _inverse(scales)).clip(-127, 127).astype(np.int8)
    return QuantisedRows("Q8_0", np.concatenate([_bytes_of(scales), quants.view(np.uint8)], axis=-1))


def quantise_nibbles(weight: np.ndarray) -> QuantisedRows:
    """[out, in], in a multiple of 32, rounded to Q4_1."""
    groups = _groups(weight)
    minima = groups.min(-1).astype(np.float16)
    scales = ((groups.max(-1) - minima) / 15).astype(np.float16)
    shifted = groups - minima.astype(np.float32)[..., None]
    quants = np.rint(shifted * _inverse(scales)).clip(0, 15).astype(np.uint8)
    halves = quants[..., : GROUP // 2] | quants[..., GROUP // 2 :] << 4
    return QuantisedRows("Q4_1", np.concatenate([_bytes_of(scales), _bytes_of(minima), halves], axis=-1))


def dequantise(rows: QuantisedRows) -> np.ndarray:
    """The values [out, in], float32: what the packed forms mean."""
    if rows.encoding == "Q8_0":
        scales = rows.blocks[..., :2].copy().view(np.float16).astype(np.float32)
        values = rows.blocks[..., 2:].view(np.int8) * scales
    else:
        scales, minima, quants = _four_bits(rows)
        values = quants * scales[..., None].astype(np.float32) + minima[..., None].astype(np.float32)
    return values.reshape(rows.shape)


def _four_bits(rows: QuantisedRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales and minima [rows, groups] float16, quants [rows, groups, 32] uint8."""
    scales = rows.blocks[..., :2].copy().view(np.float16)[..., 0]
    if rows.encoding == "Q4_1":
        minima, halves = rows.blocks[..., 2:4].copy().view(np.float16)[..., 0], rows.blocks[..., 4:]
    else:
        # A power of two: exact, up to a scale of 8188.
        minima, halves = scales * np.float16(-8), rows.blocks[..., 2:]
    return scales, minima, np.concatenate([halves & 15, halves >> 4], axis=-1)


def _padded(rows: np.ndarray) -> np.ndarray:
    missing = -len(rows) % LANES
    return np.pad(rows, ((0, missing), *((0, 0),) * (rows.ndim - 1))) if missing else rows


def _by_lane(halves: np.ndarray) -> np.ndarray:
    """float16 [rows, groups] -> bytes [blocks, groups, 32]."""
    blocks = halves.reshape(-1, LANES, halves.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(blocks).view(np.uint8)


def _groups(weight: np.ndarray) -> np.ndarray:
    return weight.astype(np.float32, copy=False).reshape(len(weight), -1, GROUP)


def _inverse(scales: np.ndarray) -> np.ndarray:
    """1 / scale for [rows, groups, 1], 0 for 0."""
    wide = scales.astype(np.float32)[..., None]
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)


def _bytes_of(halves: np.ndarray) -> np.ndarray:
    return halves[..., None].view(np.uint8)
