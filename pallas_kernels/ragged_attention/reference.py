"""The definition of ragged attention: dense, float32, as plain as it gets. A backend that disagrees is wrong."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_blocks import KVBlocks, as_float32, block_bytes, init_blocks
from pallas_kernels.kv_write import reference as kv_write
from pallas_kernels.ragged_attention.interface import AttentionBackend, Ragged


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVBlocks,
    ragged: Ragged,
    *,
    scale: float,
    layer: int | jax.Array = 0,
    window: int | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    max_q_len: int | None = None,
) -> tuple[jax.Array, KVBlocks]:
    """See `AttentionBackend`; `max_q_len` saves nothing. Memory grows with tokens x table width."""
    cache = kv_write.write(k, v, cache, ragged.slots, layer=layer)
    num_tokens, block_size, kv_heads = q.shape[0], cache.k.shape[3], cache.k.shape[2]
    tokens = jnp.arange(num_tokens)
    rows = jnp.minimum(jnp.searchsorted(ragged.q_starts[1:], tokens, side="right"), ragged.kv_lens.shape[0] - 1)
    positions = (ragged.kv_lens[rows] - ragged.q_starts[rows + 1] + tokens)[:, None]
    keys = jnp.arange(ragged.block_tables.shape[1] * block_size)
    seen = (keys <= positions) & (tokens < ragged.q_starts[-1])[:, None]  # [tokens, keys]
    if window is not None:
        seen &= keys > positions - window

    tables = jnp.where(ragged.block_tables < 0, 0, ragged.block_tables)[rows]
    k_rows, v_rows = (x[tables, layer].swapaxes(2, 3).reshape(num_tokens, -1, *k.shape[1:]) for x in as_float32(cache))
    # Unseen slots may hold NaN, and 0 * NaN is NaN: they are cleared, not only weighted by 0.
    v_rows = jnp.where(seen[:, :, None, None], v_rows, 0.0)
    grouped = q.astype(jnp.float32).reshape(num_tokens, kv_heads, -1, q.shape[-1])
    scores = jnp.einsum("tkgd,tskd->tkgs", grouped, k_rows, precision=lax.Precision.HIGHEST) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    logits = jnp.full((q.shape[1],), -jnp.inf) if sinks is None else sinks
    logits = jnp.broadcast_to(logits.reshape(kv_heads, -1, 1), (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, logits], -1), -1)[..., :-1]
    weights = jnp.where(seen[:, None, None], weights, 0.0)
    out = jnp.einsum("tkgs,tskd->tkgd", weights, v_rows, precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape).astype(q.dtype), cache


BACKEND = AttentionBackend("reference", init_blocks, block_bytes, attend)
