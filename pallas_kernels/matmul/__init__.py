"""Products with a weight of any layout: `matmul`, `take_rows`, and `linear`, a product with what lies around it; where
a layout has one, `fused_argmax` gives the largest results alone.

A layout is a registered pytree dataclass; `register` teaches the functions a new one, so that quantised weights slot in
without touching models. `preferred` says which layout suits weights of a dtype here, and why not another.
"""

from pallas_kernels.matmul.choice import LayoutChoice, not_in_rows, preferred
from pallas_kernels.matmul.fused import Norm, linear, rms_norm
from pallas_kernels.matmul.int8_rows import Int8Rows, round_rows, share_scales
from pallas_kernels.matmul.layouts import FloatWeight, Largest, Layout, fused_argmax, matmul, register, take_rows
from pallas_kernels.matmul.packed import Grouped4, Grouped8, Packed, PackedBf16, join, pack_floats, pack_quantised
from pallas_kernels.matmul.packing import QuantisedRows

__all__ = [
    "FloatWeight",
    "Grouped4",
    "Grouped8",
    "Int8Rows",
    "Largest",
    "Layout",
    "LayoutChoice",
    "Norm",
    "Packed",
    "PackedBf16",
    "QuantisedRows",
    "fused_argmax",
    "join",
    "linear",
    "matmul",
    "not_in_rows",
    "pack_floats",
    "pack_quantised",
    "preferred",
    "register",
    "rms_norm",
    "round_rows",
    "share_scales",
    "take_rows",
]
