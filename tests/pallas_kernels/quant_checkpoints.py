"""Weights in AWQ's and GPTQ's packings, written out by loops from their definitions, beside the values they mean."""

from typing import NamedTuple

import numpy as np

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


class Quantised(NamedTuple):
    """quants [in, out] and zeros [groups, out] of 0 to 15, scales [groups, out] float16, groups [in]."""

    quants: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """The weight [out, in], float64."""
        zeros, scales = (x.astype(np.float64)[self.groups] for x in (self.zeros, self.scales))
        return ((self.quants - zeros) * scales).T


def make_quantised(rng, num_in, num_out, group_size, *, act_order=False):
    num_groups = num_in // group_size
    groups = np.repeat(np.arange(num_groups), group_size)
    return Quantised(
        rng.integers(0, 16, (num_in, num_out)),
        rng.integers(0, 16, (num_groups, num_out)),
        rng.uniform(0.25, 2.0, (num_groups, num_out)).astype(np.float16),
        rng.permutation(groups) if act_order else groups,
    )


def _along_outputs(values, columns):
    words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for place, column in enumerate(columns):
        words |= values[:, column::8].astype(np.uint32) << (4 * place)
    return words.view(np.int32)


def awq_tensors(made):
    """qweight, qzeros, scales as AutoAWQ's "gemm" packs them."""
    return {
        "qweight": _along_outputs(made.quants, AWQ_COLUMNS),
        "qzeros": _along_outputs(made.zeros, AWQ_COLUMNS),
        "scales": made.scales,
    }


def gptq_tensors(made, *, less_one=True):
    """qweight, qzeros, scales and g_idx as AutoGPTQ packs them; zeros below 1 can't be told less one."""
    qweight = np.zeros((len(made.quants) // 8, made.quants.shape[1]), np.uint32)
    for place in range(8):
        qweight |= made.quants[place::8].astype(np.uint32) << (4 * place)
    return {
        "qweight": qweight.view(np.int32),
        "qzeros": _along_outputs(made.zeros - less_one, range(8)),
        "scales": made.scales,
        "g_idx": made.groups.astype(np.int32),
    }
