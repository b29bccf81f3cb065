"""Matrix products with a weight of any layout: `matmul(x, weight)`, `take_rows(weight, ids)`.

A layout is a registered pytree dataclass; `register` teaches both functions a new one, so that quantised weights slot
in without touching models.
"""

from pallas_kernels.matmul.layouts import FloatWeight, Layout, matmul, register, take_rows

__all__ = ["FloatWeight", "Layout", "matmul", "register", "take_rows"]
