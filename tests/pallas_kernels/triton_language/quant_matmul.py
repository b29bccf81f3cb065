"""Errors of the product with 4-bit weights in Triton's language, as JSON: `python -m … [--kernel FILE]`.

Runs where Triton is installed, in a process of its own: TRITON_INTERPRET changes what Triton's decorators give.
"""

from tests.pallas_kernels.triton_language.interpret import Buffer, load_kernel, report, wanted  # isort: skip (sets a variable)

import numpy as np

from pallas_kernels.quant_matmul import from_awq
from pallas_kernels.quant_matmul.interface import PAIRED
from pallas_kernels.quant_matmul.shapes import SMALL, QuantShape
from pallas_kernels.quant_matmul.tiles import quant_tiles
from tests.pallas_kernels.quant_checkpoints import awq_tensors, make_quantised

KERNEL = "pallas_kernels/quant_matmul/triton_kernel.py"
# In float16: the interpreter multiplies the bits of bfloat16 as if they were numbers.
CASES = {str(shape): (shape, 17) for shape in SMALL}
CASES |= {
    "one token": (SMALL[1], 1),
    "splits": (QuantShape(1024, 72, 128), 5),
    "65 tokens": (QuantShape(256, 136, 64), 65),
}


def errors(kernel, rng):
    for name in wanted(CASES):
        yield name, error(kernel, rng, *CASES[name])


def error(kernel, rng, shape, num_tokens):
    """The largest, relative to the largest result of float64."""
    made = make_quantised(rng, *shape)
    weight = from_awq(**awq_tensors(made))
    x = rng.standard_normal((num_tokens, shape.num_in)).astype(np.float16)
    tiles = quant_tiles(num_tokens, *shape)
    out = np.full((tiles.splits, num_tokens, shape.num_out), np.nan, np.float32)
    grid = (-(-num_tokens // tiles.tile_m), -(-shape.num_out // tiles.tile_n), tiles.splits)
    arrays = (x, np.ascontiguousarray(weight.quants), weight.scales, np.ascontiguousarray(weight.zeros), out)
    kernel.quant_matmul[grid](
        *map(Buffer, arrays),
        NUM_TOKENS=num_tokens,
        NUM_IN=shape.num_in,
        NUM_OUT=shape.num_out,
        GROUP_SIZE=shape.group_size,
        PAIRED=PAIRED,
        TILE_M=tiles.tile_m,
        TILE_N=tiles.tile_n,
        TILE_K=tiles.tile_k,
        SPLITS=tiles.splits,
    )
    exact = x.astype(np.float64) @ made.values.T
    return float(np.abs(out.sum(0) - exact).max() / np.abs(exact).max())


if __name__ == "__main__":
    report(lambda rng: errors(load_kernel(KERNEL), rng))
