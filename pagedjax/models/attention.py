"""Grouped-query self-attention over the paged cache, rotary positions, q, k and v in one product."""

from typing import Any

import jax
from flax import nnx

from pagedjax.models import rope
from pagedjax.models.config import ModelConfig
from pagedjax.models.layers import Linear
from pallas_kernels.ragged_attention import AttentionBackend, KVBlocks, Ragged


class Attention(nnx.Module):
    """One layer's attention. The cache's layout is the backend's own."""

    def __init__(self, config: ModelConfig, *, dtype: Any, backend: AttentionBackend) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.backend = backend
        num_out = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        bias = config.attention_bias
        self.qkv_proj = Linear(config.hidden_size, num_out, bias=bias, dtype=dtype)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, bias=bias, dtype=dtype)

    def __call__(
        self, x: jax.Array, turns: tuple[jax.Array, jax.Array], cache: KVBlocks, ragged: Ragged
    ) -> tuple[jax.Array, KVBlocks]:
        """x [tokens, hidden], turns = rope.tables of the tokens' positions: (out [tokens, hidden], cache)."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).reshape(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        q, k = rope.rotate(q, *turns), rope.rotate(k, *turns)
        out, cache = self.backend.attend(q, k, v, cache, ragged, scale=self.head_dim**-0.5)
        return self.o_proj(out.reshape(x.shape[0], -1)), cache
