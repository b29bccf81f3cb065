"""Paged attention by jax-triton: for GPUs before Hopper once Pallas Triton is gone.

Algorithm: Flash-Decoding with a fixed number of splits. Grid (KV head, row, split). Each program walks its share of a
row's context with the group's queries packed into one tile of a product, padded to 16, and leaves a normalised output
and the logarithm of its weight; XLA weighs them together, sinks among them. The kernel is in `triton_kernel`.

Bytes: K and V of each context once; 4 * (head_dim + 1) a head, row and split, written and read. Unlike `pallas_triton`,
a long row among short ones is not spread further than the others. Limits: see `triton.refuse_shape`; the window must be
a number.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import jax_triton_guard
from pallas_kernels.attention import AttentionNeed, AttentionShape
from pallas_kernels.kv_blocks import KVBlocks
from pallas_kernels.paged_attention.interface import PagedBackend
from pallas_kernels.paged_attention.tiles import DecodeTiles, decode_tiles
from pallas_kernels.paged_attention.walk import LOG2_E
from pallas_kernels.triton import power_of_two, refuse_device, refuse_float8, refuse_shape

MAX_SPLITS = 64


def refuse(need: AttentionNeed) -> str | None:
    """Why the kernel can't run there, or None."""
    device = refuse_device(need.platform, need.capability) or refuse_float8(need)
    return device or refuse_shape(need) or jax_triton_guard.unavailable()


def attend(
    q: jax.Array,
    cache: KVBlocks,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    layer: int | jax.Array = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    compute_capability: int | None = None,
) -> jax.Array:
    """See `PagedBackend`. `compute_capability` is that to compile for, as 80 or 90; None: this machine's GPU."""
    import jax_triton

    from pallas_kernels.paged_attention.triton_kernel import paged_attention

    shape = AttentionShape(q.shape[1], cache.k.shape[2], q.shape[2], cache.k.shape[3])
    tiles = decode_tiles(shape, q.dtype.itemsize)
    sizes = kernel_sizes(q.shape[0], cache, block_tables.shape[1], shape, tiles)
    # What a plain cache lacks is never read, but an argument must be there.
    scales = (cache.k, cache.v) if cache.k_scale is None else (cache.k_scale, cache.v_scale)
    parts, logs = jax_triton.triton_call(
        q,
        cache.k,
        cache.v,
        *scales,
        block_tables,
        kv_lens,
        jnp.asarray(layer, jnp.int32).reshape(1),
        kernel=paged_attention,
        out_shape=[
            jax.ShapeDtypeStruct((sizes["SPLITS"], *q.shape), jnp.float32),
            jax.ShapeDtypeStruct((sizes["SPLITS"], *q.shape[:2]), jnp.float32),
        ],
        grid=(shape.num_kv_heads, q.shape[0], sizes["SPLITS"]),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        compute_capability=compute_capability,
        SCALE=scale,
        SOFTCAP=softcap or 0.0,
        WINDOW=window or 0,
        PRECISION="tf32x3" if q.dtype == jnp.float32 else "tf32",
        **sizes,
    )
    return combine(parts, logs, sinks).astype(q.dtype)


def kernel_sizes(
    num_rows: int, cache: KVBlocks, max_blocks: int, shape: AttentionShape, tiles: DecodeTiles
) -> dict[str, int]:
    """The kernel's constants that follow from shapes."""
    programs = num_rows * shape.num_kv_heads
    splits = min(-(-tiles.num_programs // programs), max_blocks * shape.block_size // tiles.min_piece, MAX_SPLITS)
    return {
        "ROWS": num_rows,
        "MAX_BLOCKS": max_blocks,
        "NUM_BLOCKS": cache.k.shape[0],
        "NUM_LAYERS": cache.k.shape[1],
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.num_heads // shape.num_kv_heads,
        "BLOCK_SIZE": shape.block_size,
        "HEAD_DIM": shape.head_dim,
        "QUANTISED": cache.k_scale is not None,
        "TILE_Q": tiles.size,
        "TILE_KV": tiles.tile_kv,
        "COLUMNS": max(16, power_of_two(shape.head_dim)),
        "SPLITS": max(1, splits),
    }


def combine(parts: jax.Array, logs: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Normalised outputs [splits, rows, heads, head_dim], weighed by 2 to the power of `logs` [splits, rows, heads]:
    [rows, heads, head_dim], float32. Sinks [heads] weigh too, and give nothing. A row of nothing gives zero."""
    peak = jnp.max(logs, axis=0)
    if sinks is not None:
        peak = jnp.maximum(peak, sinks * LOG2_E)
    weights = jnp.exp2(logs - peak)
    total = jnp.sum(weights, axis=0)
    if sinks is not None:
        total = total + jnp.exp2(sinks * LOG2_E - peak)
    return jnp.sum(parts * weights[..., None], axis=0) / total[..., None]


BACKEND = PagedBackend("jax_triton", attend)
