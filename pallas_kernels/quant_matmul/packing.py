"""AWQ's and GPTQ's tensors into the one layout of `Int4Weight`, in numpy, bit for bit.

AWQ (AutoAWQ, version "gemm"): qweight [in, out / 8] and qzeros [in / group, out / 8] int32, eight outputs to a word,
where bits 4 j hold output AWQ_ORDER[j] of the eight; value (quant - zero) * scale.
GPTQ (AutoGPTQ): qweight [in / 8, out], eight inputs to a word in order; qzeros [in / group, out / 8], eight outputs in
order, less 1 in the format "gptq" and as they are in "gptq_v2"; g_idx [in] names each input's group: with act-order
(desc_act) groups were filled by importance, not by place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.quant_matmul.interface import PAIRED, Int4Weight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SHIFTS = np.arange(8, dtype=np.uint32) * 4


@dataclass(frozen=True, slots=True)
class Int4Tensor:
    """A checkpoint's weight on the host; the fields are those of `Int4Weight`."""

    quants: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    order: np.ndarray | None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight, [out, in]."""
        return self.quants.shape[1], 2 * self.quants.shape[0]


def from_awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> Int4Tensor:
    """AWQ's tensors as above. Raises ValueError for shapes that don't go together."""
    num_in, num_out = qweight.shape[0], 8 * qweight.shape[1]
    _check(num_in, num_out, qzeros, scales)
    return Int4Tensor(_pair(_awq_nibbles(qweight)), scales, _awq_nibbles(qzeros), None)


def from_gptq(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray | None, *, zeros_less_one: bool
) -> Int4Tensor:
    """GPTQ's tensors as above. Raises ValueError for shapes that don't go together, and for groups of unequal size."""
    num_in, num_out = 8 * qweight.shape[0], qweight.shape[1]
    _check(num_in, num_out, qzeros, scales)
    quants = _nibbles(qweight).transpose(0, 2, 1).reshape(num_in, num_out)
    zeros = _nibbles(qzeros).reshape(len(qzeros), num_out) + np.uint8(zeros_less_one)
    order = _order(g_idx, num_in, len(scales))
    return Int4Tensor(_pair(quants if order is None else quants[order]), scales, zeros, order)


def stack(tensors: Sequence[Int4Tensor], *, platform: str, capability: tuple[int, int] | None = None) -> Int4Weight:
    """One weight of the outputs of all, on the default device. Raises ValueError unless groups and order agree."""
    first = tensors[0]
    for other in tensors[1:]:
        if other.scales.shape[0] != first.scales.shape[0] or other.quants.shape[0] != first.quants.shape[0]:
            raise ValueError("parts of one product have different groups")
        if not _same(first.order, other.order):
            raise ValueError("parts of one product order their inputs differently")
    fields = {
        name: np.concatenate([getattr(t, name) for t in tensors], axis=1) for name in ("quants", "scales", "zeros")
    }
    order = None if first.order is None else jnp.asarray(first.order)
    on_device: dict[str, Any] = {name: jnp.asarray(value) for name, value in fields.items()}
    return Int4Weight(**on_device, order=order, platform=platform, capability=capability)


def dequantise(tensor: Int4Tensor) -> np.ndarray:
    """The values [out, in], float32."""
    blocks = tensor.quants.reshape(-1, PAIRED, tensor.quants.shape[1])
    quants = np.stack([blocks & 15, blocks >> 4], axis=1).reshape(-1, blocks.shape[2])
    group_size = len(quants) // len(tensor.scales)
    scales, zeros = (np.repeat(x.astype(np.float32), group_size, axis=0) for x in (tensor.scales, tensor.zeros))
    values = (quants - zeros) * scales
    if tensor.order is not None:
        values[tensor.order] = values.copy()
    return values.T


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _check(num_in: int, num_out: int, qzeros: np.ndarray, scales: np.ndarray) -> None:
    num_groups = len(scales)
    if scales.shape != (num_groups, num_out) or qzeros.shape != (num_groups, num_out // 8):
        raise ValueError(
            f"scales {scales.shape} and zeros {qzeros.shape} do not belong to {num_in} x {num_out} weights"
        )
    if not num_groups or num_in % num_groups or num_in // num_groups % (2 * PAIRED):
        raise ValueError(f"{num_in} inputs in {num_groups} groups: not groups of a multiple of {2 * PAIRED}")


def _nibbles(words: np.ndarray) -> np.ndarray:
    """[rows, columns] int32 -> [rows, columns, 8] uint8, low bits first."""
    return (words.view(np.uint32)[..., None] >> _SHIFTS & 15).astype(np.uint8)


def _awq_nibbles(words: np.ndarray) -> np.ndarray:
    """[rows, out / 8] int32 -> [rows, out] uint8."""
    found = np.empty((*words.shape, 8), np.uint8)
    found[..., AWQ_ORDER] = _nibbles(words)
    return found.reshape(len(words), -1)


def _order(g_idx: np.ndarray | None, num_in: int, num_groups: int) -> np.ndarray | None:
    """Which input stands at each place so that groups lie together; None where they do already."""
    plain = np.repeat(np.arange(num_groups), num_in // num_groups)
    if g_idx is None or np.array_equal(g_idx, plain):
        return None
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if g_idx.shape != (num_in,) or not np.array_equal(g_idx[order], plain):
        raise ValueError(f"g_idx does not name {num_groups} groups of {num_in // num_groups} inputs each")
    return order


def _pair(quants: np.ndarray) -> np.ndarray:
    """[in, out], a value a byte -> [in / 2, out] as `Int4Weight` has it."""
    blocks = quants.reshape(-1, 2, PAIRED, quants.shape[1])
    return (blocks[:, 0] | blocks[:, 1] << 4).reshape(-1, quants.shape[1])
