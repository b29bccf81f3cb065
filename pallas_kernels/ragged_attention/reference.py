"""The definition of ragged attention: dense, float32, as plain as it gets. A backend that disagrees is wrong."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_attention.interface import AttentionBackend, KVBlocks, Ragged, kv_block_bytes, write_slots


def init_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any, num_layers: int = 1
) -> KVBlocks:
    """Zeroed K and V, [num_blocks, num_layers, block_size, kv_heads, head_dim] each."""
    shape = (num_blocks, num_layers, block_size, num_kv_heads, head_dim)
    return KVBlocks(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVBlocks,
    ragged: Ragged,
    *,
    scale: float,
    layer: int | jax.Array = 0,
) -> tuple[jax.Array, KVBlocks]:
    """See `AttentionBackend`. Memory grows with tokens x table width."""
    block_size, kv_heads, head_dim = cache.k.shape[2:]
    flat = [c[:, layer].reshape(-1, kv_heads, head_dim) for c in cache]
    flat = [write_slots(c, x, ragged.slots) for c, x in zip(flat, (k, v))]
    blocks = [c.reshape(-1, block_size, kv_heads, head_dim) for c in flat]

    tokens = jnp.arange(q.shape[0])
    rows = jnp.minimum(jnp.searchsorted(ragged.q_starts[1:], tokens, side="right"), ragged.kv_lens.shape[0] - 1)
    positions = ragged.kv_lens[rows] - ragged.q_starts[rows + 1] + tokens
    keys = jnp.arange(ragged.block_tables.shape[1] * block_size)
    seen = (keys <= positions[:, None]) & (tokens < ragged.q_starts[-1])[:, None]  # [tokens, keys]

    tables = jnp.where(ragged.block_tables < 0, 0, ragged.block_tables)[rows]
    k_rows, v_rows = (c[tables].reshape(q.shape[0], -1, kv_heads, head_dim).astype(jnp.float32) for c in blocks)
    # Unseen slots may hold NaN, and 0 * NaN is NaN: they are cleared, not only weighted by 0.
    v_rows = jnp.where(seen[:, :, None, None], v_rows, 0.0)
    grouped = q.astype(jnp.float32).reshape(q.shape[0], kv_heads, -1, head_dim)
    scores = jnp.einsum("tkgd,tskd->tkgs", grouped, k_rows, precision=lax.Precision.HIGHEST) * scale
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    weights = jnp.where(seen[:, None, None], jax.nn.softmax(scores, -1), 0.0)
    out = jnp.einsum("tkgs,tskd->tkgd", weights, v_rows, precision=lax.Precision.HIGHEST)
    cache = KVBlocks(*(c.at[:, layer].set(new) for c, new in zip(cache, blocks)))
    return out.reshape(q.shape).astype(q.dtype), cache


BACKEND = AttentionBackend("reference", init_cache, kv_block_bytes, attend)
