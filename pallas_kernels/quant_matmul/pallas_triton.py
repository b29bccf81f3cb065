"""The product with 4-bit weights as a Pallas Triton kernel: weights are dequantised in registers.

Algorithm: a tiled product, as in the kernels of AutoAWQ and GPTQ. Grid (token tile, output tile, split). A program
walks its share of the inputs, `tile_k` at a time and never across a group. A byte holds inputs 16 apart, so that its
low and its high bits are two operands of two products, and nothing is shuffled. quant - zero is a small integer, exact
in 16 bits; the group's scale multiplies the partial sum in float32. So the weights are not rounded at all.

Bytes: half a byte a weight, once for each token tile, and 3 / group_size of a byte for scales and zeros; x once for
each output tile; float32 results once for each split. Limits: float16 and bfloat16; few tokens, see `MAX_TOKENS`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.quant_matmul.interface import PAIRED, Int4Weight, QuantBackend, QuantNeed
from pallas_kernels.quant_matmul.reference import ordered
from pallas_kernels.quant_matmul.tiles import QuantTiles, quant_tiles
from pallas_kernels.triton import plt, refuse_device

# Above, writing the weight out in 16 bits (4 bytes a weight more to move) costs less than the plain product gains on
# this one. On an H200 (4.8 TB/s, 790 TFLOP/s) that is at 330 tokens, if the kernel runs at half of the matmul rate.
# Reasoned, not measured.
MAX_TOKENS = 256
DTYPES = ("bfloat16", "float16")


def refuse_interpreted(need: QuantNeed) -> str | None:
    """Why the kernel can't take this anywhere, or None."""
    if plt is None:
        return f"JAX {jax.__version__} has no Pallas Triton any more"
    return refuse_shape(need)


def refuse_shape(need: QuantNeed) -> str | None:
    """Why a kernel of this algorithm can't take these shapes, or None."""
    if need.dtype.name not in DTYPES:
        return f"dtype {need.dtype.name} is not one of {', '.join(DTYPES)}"
    if need.group_size % (2 * PAIRED):
        return f"groups of {need.group_size} inputs are no multiple of {2 * PAIRED}"
    if need.num_tokens > MAX_TOKENS:
        return f"{need.num_tokens} tokens are more than {MAX_TOKENS}: dequantising the weight first is cheaper"
    return None


def refuse(need: QuantNeed) -> str | None:
    """Why the compiled kernel can't run there, or None."""
    return refuse_device(need.platform, need.capability) or refuse_interpreted(need)


def multiply(x: jax.Array, weight: Int4Weight, *, interpret: bool = False) -> jax.Array:
    """See `QuantBackend`. `choose` asks `refuse` first; here JAX itself complains."""
    tiles = quant_tiles(x.shape[0], weight.num_in, weight.num_out, weight.group_size)
    rest = pl.BlockSpec(memory_space=pl.ANY)
    sums = pl.pallas_call(
        partial(_kernel, tiles=tiles, group_size=weight.group_size),
        grid=(pl.cdiv(x.shape[0], tiles.tile_m), pl.cdiv(weight.num_out, tiles.tile_n), tiles.splits),
        in_specs=[rest] * 4,
        out_specs=rest,
        out_shape=jax.ShapeDtypeStruct((tiles.splits, x.shape[0], weight.num_out), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="quant_matmul",
    )(ordered(x, weight), weight.quants, weight.scales, weight.zeros)
    return sums[0] if tiles.splits == 1 else jnp.sum(sums, axis=0)


def _kernel(
    x_ref: Any,  # [tokens, in]
    quants_ref: Any,  # [in / 2, out]
    scales_ref: Any,  # [groups, out]
    zeros_ref: Any,  # [groups, out]
    out_ref: Any,  # [splits, tokens, out] float32
    *,
    tiles: QuantTiles,
    group_size: int,
) -> None:
    num_tokens, num_in = x_ref.shape
    half = tiles.tile_k // 2
    rows = pl.program_id(0) * tiles.tile_m + jnp.arange(tiles.tile_m)
    columns = pl.program_id(1) * tiles.tile_n + jnp.arange(tiles.tile_n)
    split = pl.program_id(2)
    places = jnp.arange(half)
    low_inputs = places // PAIRED * 2 * PAIRED + places % PAIRED
    real, inside = rows < num_tokens, columns < quants_ref.shape[1]

    def step(i: jax.Array, sums: jax.Array) -> jax.Array:
        group = i * tiles.tile_k // group_size
        zeros = plt.load(zeros_ref.at[group, columns], mask=inside, other=0).astype(jnp.int32)
        scales = plt.load(scales_ref.at[group, columns], mask=inside, other=0.0).astype(jnp.float32)
        where = ((i * half + places)[:, None], columns[None])
        pairs = plt.load(quants_ref.at[where], mask=jnp.broadcast_to(inside[None], (half, tiles.tile_n)), other=0)
        pairs = pairs.astype(jnp.int32)  # [half, tile_n]
        partial_sums = jnp.zeros((tiles.tile_m, tiles.tile_n), jnp.float32)
        for quants, first in ((pairs & 15, 0), (pairs >> 4, PAIRED)):
            inputs = (i * tiles.tile_k + first + low_inputs)[None]
            mask = jnp.broadcast_to(real[:, None], (tiles.tile_m, half))
            x = plt.load(x_ref.at[rows[:, None], inputs], mask=mask, other=0.0)  # [tile_m, half]
            partial_sums += plt.dot(x, (quants - zeros[None]).astype(x.dtype))
        return sums + partial_sums * scales[None]

    share = num_in // tiles.tile_k // tiles.splits
    sums = jnp.zeros((tiles.tile_m, tiles.tile_n), jnp.float32)
    sums = lax.fori_loop(0, share, lambda i, sums: step(split * share + i, sums), sums)
    plt.store(out_ref.at[split, rows[:, None], columns[None]], sums, mask=real[:, None] & inside[None])


BACKEND = QuantBackend("pallas_triton", multiply)
INTERPRETED = QuantBackend("pallas_triton_interpret", partial(multiply, interpret=True))
