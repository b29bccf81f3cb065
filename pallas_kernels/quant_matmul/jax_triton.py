"""The kernel of `pallas_triton` by way of jax-triton: for GPUs before Hopper once Pallas Triton is gone.

Same algorithm, tiles, bytes and limits; the kernel is in `triton_kernel`, in Triton's own language.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import jax_triton_guard
from pallas_kernels.quant_matmul.interface import PAIRED, Int4Weight, QuantBackend, QuantNeed
from pallas_kernels.quant_matmul.pallas_triton import refuse_shape
from pallas_kernels.quant_matmul.reference import ordered
from pallas_kernels.quant_matmul.tiles import quant_tiles
from pallas_kernels.triton import refuse_device


def refuse(need: QuantNeed) -> str | None:
    """Why the kernel can't run there, or None."""
    device = refuse_device(need.platform, need.capability)
    return device or refuse_shape(need) or jax_triton_guard.unavailable()


def multiply(x: jax.Array, weight: Int4Weight) -> jax.Array:
    """See `QuantBackend`. The weight's `capability` is compiled for; where it is None, that of the GPU."""
    import jax_triton

    from pallas_kernels.quant_matmul.triton_kernel import quant_matmul

    num_tokens = x.shape[0]
    tiles = quant_tiles(num_tokens, weight.num_in, weight.num_out, weight.group_size)
    major, minor = weight.capability or (0, 0)
    sums = jax_triton.triton_call(
        ordered(x, weight),
        weight.quants,
        weight.scales,
        weight.zeros,
        kernel=quant_matmul,
        out_shape=jax.ShapeDtypeStruct((tiles.splits, num_tokens, weight.num_out), jnp.float32),
        grid=(-(-num_tokens // tiles.tile_m), -(-weight.num_out // tiles.tile_n), tiles.splits),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        compute_capability=10 * major + minor or None,
        NUM_TOKENS=num_tokens,
        NUM_IN=weight.num_in,
        NUM_OUT=weight.num_out,
        GROUP_SIZE=weight.group_size,
        PAIRED=PAIRED,
        TILE_M=tiles.tile_m,
        TILE_N=tiles.tile_n,
        TILE_K=tiles.tile_k,
        SPLITS=tiles.splits,
    )
    return sums[0] if tiles.splits == 1 else jnp.sum(sums, axis=0)


BACKEND = QuantBackend("jax_triton", multiply)
