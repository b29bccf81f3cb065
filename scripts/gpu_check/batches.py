"""Random batches for the kernels, made on the device, with everything unused poisoned by NaN."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_blocks import KVBlocks, init_blocks, is_quantised, quantise
from pallas_kernels.ragged_attention import AttentionShape, Ragged


class Batch(NamedTuple):
    """Queries, keys and values of `num_real` packed tokens and padding, the cache before the step, and where it all
    lies. `cache` is laid out as `init_blocks` does."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    cache: KVBlocks
    ragged: Ragged
    num_real: int


def make(
    shape: AttentionShape,
    rows: list[tuple[int, int]],
    dtype: Any,
    *,
    kv_dtype: str | None = None,
    num_padding: int = 3,
    seed: int = 0,
) -> Batch:
    """`rows` are (query tokens, cached tokens with these), decodes first. Blocks of a row lie anywhere."""
    rng = np.random.default_rng(seed)
    num_blocks = [-(-kv_len // shape.block_size) for _, kv_len in rows]
    total = sum(num_blocks) + 4
    free = iter(rng.permutation(total).tolist())
    q_lens, kv_lens = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    num_real, q_starts = int(q_lens.sum()), np.concatenate([[0], np.cumsum(q_lens)])
    tables = np.full((len(rows), max(num_blocks) + 1), -1, np.int32)
    slots = np.full(num_real + num_padding, -1, np.int32)
    used = np.zeros(total * shape.block_size, bool)
    for row, (q_len, kv_len) in enumerate(rows):
        tables[row, : num_blocks[row]] = [next(free) for _ in range(num_blocks[row])]
        positions = np.arange(kv_len)
        places = tables[row, positions // shape.block_size] * shape.block_size + positions % shape.block_size
        slots[q_starts[row] : q_starts[row + 1]] = places[kv_len - q_len :]
        used[places[: kv_len - q_len]] = True
    num_decodes = next((i for i, q_len in enumerate(q_lens) if q_len != 1), len(rows))
    ragged = Ragged(*(jnp.asarray(x, jnp.int32) for x in (tables, q_starts, kv_lens, slots, num_decodes)))
    keys = jax.random.split(jax.random.key(seed), 4)
    num_tokens = num_real + num_padding
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (jax.random.normal(key, (num_tokens, n, shape.head_dim), dtype) for key, n in zip(keys, heads))
    cache = _cache(shape, used.reshape(total, shape.block_size), keys[3], dtype, kv_dtype)
    return Batch(q, k, v, cache, ragged, num_real)


def _cache(shape: AttentionShape, used: np.ndarray, key: jax.Array, dtype: Any, kv_dtype: str | None) -> KVBlocks:
    """Random where a row has a token, NaN elsewhere (of a quantised cache, in the scales)."""
    empty = jax.eval_shape(
        lambda: init_blocks(len(used), shape.block_size, shape.num_kv_heads, shape.head_dim, kv_dtype or dtype)
    )
    there = jnp.asarray(used)[:, None, None, :]  # [blocks, layers, heads, tokens]
    plain = [jax.random.normal(part, empty.k.shape, jnp.dtype(dtype)) for part in jax.random.split(key)]
    if not is_quantised(empty.k.dtype):
        return KVBlocks(*(jnp.where(there[..., None], x, jnp.nan).astype(dtype) for x in plain))
    (k, k_scale), (v, v_scale) = (quantise(x, kv_dtype) for x in plain)
    return KVBlocks(k, v, *(jnp.where(there, x, jnp.nan) for x in (k_scale, v_scale)))
