"""The definition of paged attention: dense, float32. A backend that disagrees is wrong."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_blocks import KVBlocks, as_float32
from pallas_kernels.paged_attention.interface import PagedBackend


def attend(
    q: jax.Array,
    cache: KVBlocks,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    layer: int | jax.Array = 0,
    window: int | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `PagedBackend`. Memory grows with rows x table width."""
    (rows, heads, head_dim), kv_heads, block_size = q.shape, *cache.k.shape[2:4]
    tables = jnp.clip(block_tables, 0, cache.k.shape[0] - 1)
    # [rows, tokens, kv_heads, head_dim]
    k, v = (x[tables, layer].swapaxes(2, 3).reshape(rows, -1, kv_heads, head_dim) for x in as_float32(cache))
    keys, ends = jnp.arange(block_tables.shape[1] * block_size), kv_lens[:, None]
    seen = (keys < ends) & (keys >= (0 if window is None else ends - window))
    grouped = q.astype(jnp.float32).reshape(rows, kv_heads, -1, head_dim)
    scores = jnp.einsum("rkgd,rskd->rkgs", grouped, k, precision=lax.Precision.HIGHEST) * scale
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    logits = jnp.full(heads, -jnp.inf) if sinks is None else sinks
    logits = jnp.broadcast_to(logits.reshape(kv_heads, -1, 1), (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, logits], -1), -1)[..., :-1]
    # Cleared, not only weighted by 0: unseen slots and rows of nothing may hold NaN, and 0 * NaN is NaN.
    weights, v = jnp.where(seen[:, None, None], weights, 0.0), jnp.where(seen[..., None, None], v, 0.0)
    return jnp.einsum("rkgs,rskd->rkgd", weights, v, precision=lax.Precision.HIGHEST).reshape(q.shape).astype(q.dtype)


BACKEND = PagedBackend("reference", attend)
