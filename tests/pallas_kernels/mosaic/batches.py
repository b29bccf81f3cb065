"""Small batches for the Mosaic GPU kernels, and what they must give, by loops in float64.

Slots that no row's tokens lie in hold NaN, in blocks of other rows and of none; so do all other layers.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_blocks import KVBlocks
from pallas_kernels.ragged_attention import AttentionShape, Ragged

NUM_LAYERS, LAYER = 2, 1


class Batch(NamedTuple):
    q: Any  # [tokens, heads, head_dim]
    k: Any  # [tokens, kv_heads, head_dim]
    v: Any
    before: KVBlocks  # the cache without the step's tokens
    cache: KVBlocks  # the same with them
    ragged: Ragged
    shape: AttentionShape


def make_batch(
    shape: AttentionShape, rows: list[tuple[int, int]], padding: int, dtype: str, rng: np.random.Generator
) -> Batch:
    """Rows of (query tokens, cached tokens), leading decodes first, then `padding` tokens of none, whose slots lie
    before the cache or past it. Unused table entries name no block."""
    size = shape.block_size
    counts = [-(-kv_len // size) for _, kv_len in rows]
    num_blocks = sum(counts) + 2
    free = iter(rng.permutation(num_blocks))
    tables = np.full((len(rows), max([1, *counts]) + 1), -7, np.int32)
    layers = np.full((2, num_blocks, NUM_LAYERS, shape.num_kv_heads, size, shape.head_dim), np.nan)
    for table, (_, kv_len), count in zip(tables, rows, counts):
        table[:count] = [next(free) for _ in range(count)]
        for i, block in enumerate(table[:count]):
            live = min(size, kv_len - i * size)
            layers[:, block, LAYER, :, :live] = rng.standard_normal((2, shape.num_kv_heads, live, shape.head_dim))
    q_lens = [q_len for q_len, _ in rows]
    num_decodes = next((i for i, q_len in enumerate(q_lens) if q_len != 1), len(rows))
    starts, kv_lens = np.cumsum([0, *q_lens]), [kv_len for _, kv_len in rows]
    num_tokens, num_slots = int(starts[-1]) + padding, num_blocks * size
    places = [
        table[i // size] * size + i % size for table, (q_len, n) in zip(tables, rows) for i in range(n - q_len, n)
    ]
    slots = np.array([*places, *rng.choice([-1, -size - 1, num_slots, 2**31 - 1], padding)], np.int64)
    q = rng.standard_normal((num_tokens, shape.num_heads, shape.head_dim))
    k, v = rng.standard_normal((2, num_tokens, shape.num_kv_heads, shape.head_dim))
    blocks, offsets = np.divmod(slots[: len(places)], size)
    before = layers.copy()
    for x, layer, old in zip((k, v), layers, before):
        x[: len(places)] = layer[blocks, LAYER, :, offsets]
        old[blocks, LAYER, :, offsets] = np.nan
    ragged = Ragged(*(jnp.asarray(x, jnp.int32) for x in (tables, starts, kv_lens, slots, num_decodes)))
    caches = [KVBlocks(*(jnp.asarray(x, dtype) for x in leaves)) for leaves in (before, layers)]
    return Batch(*(jnp.asarray(x, dtype) for x in (q, k, v)), *caches, ragged, shape)


def expected(
    batch: Batch, window: int | None = None, softcap: float | None = None, sinks: np.ndarray | None = None
) -> np.ndarray:
    """[tokens, heads, head_dim] float64, zero for padding and for rows of nothing."""
    q, k, v = (np.asarray(x, np.float64) for x in (batch.q, *batch.cache[:2]))
    tables, starts, kv_lens = (np.asarray(x) for x in batch.ragged[:3])
    group, out = batch.shape.num_heads // batch.shape.num_kv_heads, np.zeros(q.shape)
    for row, kv_len in enumerate(kv_lens):
        if kv_len == 0:
            continue
        places = np.arange(kv_len)
        blocks, offsets = tables[row, places // batch.shape.block_size], places % batch.shape.block_size
        for token in range(starts[row], starts[row + 1]):
            position = kv_len - starts[row + 1] + token
            first = 0 if window is None else max(0, position + 1 - window)
            where = blocks[first : position + 1], offsets[first : position + 1]
            for head in range(q.shape[1]):
                scores = k[where[0], LAYER, head // group, where[1]] @ q[token, head] * batch.shape.head_dim**-0.5
                weights = np.exp(scores if softcap is None else softcap * np.tanh(scores / softcap))
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[head])))
                out[token, head] = weights @ v[where[0], LAYER, head // group, where[1]] / total
    return out
