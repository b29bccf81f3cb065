"""Errors of paged attention in Triton's language, as JSON: `python -m … [--kernel FILE]`; see `interpret`.

In float32 and float16: the interpreter multiplies the bits of bfloat16 as if they were numbers.
"""

from tests.pallas_kernels.triton_language.interpret import Buffer, load_kernel, report, wanted  # isort: skip (sets a variable)

import numpy as np

from pallas_kernels.attention import AttentionShape
from pallas_kernels.paged_attention.jax_triton import combine, kernel_sizes
from pallas_kernels.paged_attention.tiles import decode_tiles
from tests.pallas_kernels.decodes import expected, make_decodes, relative_error, to_cache

KERNEL = "pallas_kernels/paged_attention/triton_kernel.py"
LENGTHS = (0, 1, 16, 17, 300, 513, 0)
GROUPED = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, block_size=16)
CASES = {
    "plain": (GROUPED, "float32", {}),
    "plain, float16": (GROUPED, "float16", {}),
    "window": (GROUPED, "float32", {"window": 33}),
    "soft-cap": (GROUPED, "float32", {"softcap": 2.0}),
    "sinks": (GROUPED, "float32", {"sinks": True}),
    "everything": (GROUPED, "float32", {"window": 100, "softcap": 3.0, "sinks": True, "kv_dtype": "int8"}),
    "int8": (GROUPED, "float32", {"kv_dtype": "int8"}),
    "head_dim 80, no groups, blocks of 8": (AttentionShape(3, 3, 80, 8), "float32", {}),
    "group of 16, blocks of 64": (AttentionShape(16, 1, 128, 64), "float32", {}),
    "odd group": (AttentionShape(9, 3, 96, 32), "float32", {}),
}


def errors(kernel, rng):
    for name in wanted(CASES):
        shape, dtype, options = CASES[name]
        yield name, error(kernel, rng, shape, dtype, **options)


def error(kernel, rng, shape, dtype, *, window=None, softcap=None, sinks=False, kv_dtype=None):
    batch = make_decodes(rng, shape, LENGTHS, 1024, dtype)
    cache = to_cache(batch, dtype, kv_dtype)
    learnt = rng.standard_normal(shape.num_heads).astype(np.float32) if sinks else None
    sizes = kernel_sizes(
        len(LENGTHS), cache, batch.tables.shape[1], shape, decode_tiles(shape, np.dtype(dtype).itemsize)
    )
    splits = sizes["SPLITS"]
    parts = np.full((splits, *batch.q.shape), np.nan, np.float32)
    logs = np.full((splits, *batch.q.shape[:2]), np.nan, np.float32)
    leaves = (cache.k, cache.v, *((cache.k_scale, cache.v_scale) if kv_dtype else (cache.k, cache.v)))
    integers = (batch.tables.astype(np.int32), batch.kv_lens.astype(np.int32), np.array([1], np.int32))
    arrays = (batch.q.astype(dtype), *map(np.array, leaves), *integers, parts, logs)
    kernel.paged_attention[(shape.num_kv_heads, len(LENGTHS), splits)](
        *map(Buffer, arrays),
        SCALE=shape.head_dim**-0.5,
        SOFTCAP=softcap or 0.0,
        WINDOW=window or 0,
        PRECISION="tf32x3",
        **sizes,
    )
    wanted = expected(batch, shape.head_dim**-0.5, window=window, softcap=softcap, sinks=learnt, kv_dtype=kv_dtype)
    return relative_error(combine(parts, logs, learnt), wanted)


if __name__ == "__main__":
    report(lambda rng: errors(load_kernel(KERNEL), rng))
