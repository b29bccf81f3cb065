"""Decode batches over paged caches in float64, with everything unused poisoned by NaN."""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import AttentionShape
from pallas_kernels.kv_blocks import KVBlocks
from tests.pallas_kernels.cases import quantised


class Decodes(NamedTuple):
    q: np.ndarray  # [rows, heads, head_dim]
    k: np.ndarray  # [num_blocks, kv_heads, block_size, head_dim]; NaN where no row has a cached token
    v: np.ndarray
    tables: np.ndarray  # [rows, max_blocks]; past a row's length ids out of any range
    kv_lens: np.ndarray  # [rows]


def fresh_rng() -> np.random.Generator:
    """Another one each time, its seed printed; SEED in the environment repeats a run."""
    seed = int(os.environ.get("SEED") or np.random.SeedSequence().entropy % 2**32)
    print(f"SEED={seed}")
    return np.random.default_rng(seed)


def make_decodes(
    rng: np.random.Generator, shape: AttentionShape, kv_lens: tuple[int, ...], max_len: int, dtype: Any
) -> Decodes:
    """Numbers are those that `dtype` holds."""
    num_rows, max_blocks = len(kv_lens), max_len // shape.block_size
    num_used = sum(-(-n // shape.block_size) for n in kv_lens)
    order = iter(rng.permutation(num_used + 5))
    tables = rng.choice([-1, 2**30, -(2**31)], (num_rows, max_blocks))
    k, v = np.full((2, num_used + 5, shape.num_kv_heads, shape.block_size, shape.head_dim), np.nan)
    for row, kv_len in enumerate(kv_lens):
        for i in range(-(-kv_len // shape.block_size)):
            tables[row, i] = block = next(order)
            size = min(kv_len - i * shape.block_size, shape.block_size)
            for x in (k, v):
                x[block, :, :size] = rng.standard_normal((shape.num_kv_heads, size, shape.head_dim))
    q = rng.standard_normal((num_rows, shape.num_heads, shape.head_dim))
    q, k, v = (x.astype(jnp.dtype(dtype)).astype(np.float64) for x in (q, k, v))
    return Decodes(q, k, v, tables, np.array(kv_lens))


def to_cache(batch: Decodes, dtype: Any, kv_dtype: str | None = None, num_layers: int = 2, layer: int = 1) -> KVBlocks:
    """The cache as the GPU backends lay it out; other layers hold NaN, or scales that are."""
    leaves = [batch.k, batch.v]
    if kv_dtype is not None:
        values, scales = zip(*(quantised(x, kv_dtype) for x in leaves))
        leaves = [*values, *scales]
    dtypes = (kv_dtype or dtype,) * 2 + (np.float32,) * 2
    return KVBlocks(*(_layered(x.astype(jnp.dtype(t)), num_layers, layer) for x, t in zip(leaves, dtypes)))


def _layered(x: np.ndarray, num_layers: int, layer: int) -> jax.Array:
    fill = 0 if x.dtype == np.int8 else np.nan
    layered = np.full((x.shape[0], num_layers, *x.shape[1:]), fill, x.dtype)
    layered[:, layer] = x
    return jnp.asarray(layered)


def expected(
    batch: Decodes,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    kv_dtype: str | None = None,
) -> np.ndarray:
    """In numpy, float64, row by row."""
    k, v = batch.k, batch.v
    if kv_dtype is not None:
        k, v = (values.astype(np.float64) * s[..., None] for values, s in (quantised(x, kv_dtype) for x in (k, v)))
    out, kv_heads = np.zeros(batch.q.shape), k.shape[1]
    for row, kv_len in enumerate(batch.kv_lens):
        if kv_len:
            blocks = batch.tables[row, : -(-kv_len // k.shape[2])]
            # [kv_heads, tokens, head_dim]
            keys, values = (
                x[blocks].swapaxes(0, 1).reshape(kv_heads, -1, x.shape[-1])[:, :kv_len][:, -(window or kv_len) :]
                for x in (k, v)
            )
            scores = np.einsum("kgd,ksd->kgs", batch.q[row].reshape(kv_heads, -1, k.shape[-1]), keys) * scale
            weights = np.exp(scores if softcap is None else softcap * np.tanh(scores / softcap))
            total = weights.sum(-1) + (0 if sinks is None else np.exp(np.float64(sinks)).reshape(kv_heads, -1))
            out[row] = (np.einsum("kgs,ksd->kgd", weights, values) / total[..., None]).reshape(out[row].shape)
    return out


def relative_error(got: Any, wanted: np.ndarray) -> float:
    """The largest difference, by the size of a typical number of its vector; infinite for NaN."""
    got = np.asarray(got, np.float64)
    size = np.sqrt(np.mean(wanted**2, axis=-1, keepdims=True))
    return float(np.nan_to_num(np.abs(got - wanted) / np.maximum(size, 1e-6), nan=np.inf).max())
