"""Products with weights of 4 bits in groups, as AWQ and GPTQ make them; activations stay in 16 bits or float32 (W4A16).

Both kinds of checkpoint become one layout (`packing`), `Int4Weight`, which `matmul` knows from here on. `reference`
defines the product; `choice.choose` picks a backend by device, tokens and shape, and says why not another.
"""

from pallas_kernels.matmul import Layout, register
from pallas_kernels.quant_matmul.choice import choose, multiply
from pallas_kernels.quant_matmul.interface import Int4Weight, QuantBackend, QuantNeed
from pallas_kernels.quant_matmul.packing import Int4Tensor, from_awq, from_gptq, stack
from pallas_kernels.quant_matmul.reference import take_rows

__all__ = [
    "Int4Tensor",
    "Int4Weight",
    "QuantBackend",
    "QuantNeed",
    "choose",
    "from_awq",
    "from_gptq",
    "multiply",
    "stack",
]

register(Int4Weight, Layout(multiply, take_rows))
