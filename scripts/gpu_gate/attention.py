"""The kernels that an attention backend consists of, and what each must use: see `Case.kernels`."""

from collections.abc import Mapping

from scripts.gpu_gate.cases import TENSOR_CORES

Kernels = Mapping[str, tuple[tuple[str, ...], ...]]
_HOPPER = (("wgmma",), ("tma",))

# By backend: a decode whose contexts are not split, and one whose are.
DECODE: Mapping[str, Kernels] = {
    "pallas_mosaic": {"paged_attention_mosaic": _HOPPER},
    "pallas_triton": {"paged_attention": (TENSOR_CORES,)},
    "jax_triton": {"paged_attention": (TENSOR_CORES,)},
}
SPLIT_DECODE: Mapping[str, Kernels] = {
    "pallas_mosaic": {**DECODE["pallas_mosaic"], "paged_attention_combine": ()},
    "pallas_triton": {"paged_attention_pieces": (TENSOR_CORES,), "paged_attention_combine": ()},
    "jax_triton": DECODE["jax_triton"],
}
# A step of decodes, with writing (which XLA does beside Mosaic), and one of any mix.
DECODES: Mapping[str, Kernels] = {
    "pallas_mosaic": SPLIT_DECODE["pallas_mosaic"],
    "pallas_triton": {**SPLIT_DECODE["pallas_triton"], "kv_write": ()},
}
MIXED: Mapping[str, Kernels] = {
    "pallas_mosaic": {**DECODES["pallas_mosaic"], "ragged_attention_mosaic": _HOPPER},
    "pallas_triton": {**DECODES["pallas_triton"], "ragged_attention": (TENSOR_CORES,)},
}
