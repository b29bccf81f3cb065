"""Grouped-query self-attention over the paged cache: the products around it, and rotary positions inside."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.models import rope
from pagedjax.models.config import ModelConfig
from pagedjax.models.layers import Linear, RMSNorm
from pagedjax.models.stack import Mix
from pallas_kernels.ragged_attention import AttentionBackend, KVBlocks, Ragged


class Attention(nnx.Module):
    """One layer's projections, q, k and v in one product."""

    def __init__(self, config: ModelConfig, *, dtype: Any, sum_over: str | None = None) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        num_out = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        bias = config.attention_bias
        self.qkv_proj = Linear(config.hidden_size, num_out, bias=bias, dtype=dtype)
        num_in = self.num_heads * self.head_dim
        self.o_proj = Linear(num_in, config.hidden_size, bias=bias, dtype=dtype, sum_over=sum_over)

    def heads(self, x: jax.Array, *, norm: RMSNorm) -> jax.Array:
        """norm(x), x [tokens, hidden]: q, k and v side by side, [tokens, heads + 2 kv_heads, head_dim]."""
        num_heads = self.num_heads + 2 * self.num_kv_heads
        return self.qkv_proj(x, norm=norm).reshape(x.shape[0], num_heads, self.head_dim)

    def merge(self, attended: jax.Array, *, residual: jax.Array) -> jax.Array:
        """attended [tokens, heads, head_dim]: residual plus its projection, [tokens, hidden]."""
        return self.o_proj(attended.reshape(attended.shape[0], -1), residual=residual)


def mixer(
    backend: AttentionBackend,
    config: ModelConfig,
    positions: jax.Array,
    ragged: Ragged,
    *,
    max_q_len: int | None = None,
) -> Mix:
    """How tokens at `positions` [tokens] rotate, write to the cache and attend: equal in all layers. `max_q_len` is
    the promise of `AttentionBackend`."""
    frequencies = rope.inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    turns = rope.tables(positions, frequencies)
    # Numpy's own arrays can't be indexed by traced values.
    ragged = Ragged(*map(jnp.asarray, ragged))

    scale = config.head_dim**-0.5

    def mix(qkv: jax.Array, cache: KVBlocks, layer: int | jax.Array) -> tuple[jax.Array, KVBlocks]:
        if backend.attend_turned is not None:
            return backend.attend_turned(qkv, turns, cache, ragged, scale=scale, layer=layer)
        q, k, v = jnp.split(qkv, (config.num_heads, config.num_heads + config.num_kv_heads), axis=1)
        q, k = rope.rotate(q, *turns), rope.rotate(k, *turns)
        return backend.attend(q, k, v, cache, ragged, scale=scale, layer=layer, max_q_len=max_q_len)

    return mix
