"""The parts that decoder models are made of. Activations are [tokens, features] in the model's dtype."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.matmul import FloatWeight, matmul, take_rows


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, in float32 (arXiv:1910.07467). The weight stays float32: it is small."""

    def __init__(self, size: int, eps: float) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normal * self.weight[...]).astype(x.dtype)


class Linear(nnx.Module):
    """x @ weight.T + bias. The weight is a value of some layout, [out, in] when plain."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, dtype: Any) -> None:
        self.weight = nnx.Param(FloatWeight(jnp.zeros((num_out, num_in), dtype)))
        self.bias = nnx.Param(jnp.zeros(num_out, dtype)) if bias else None

    def __call__(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        if self.bias is None:
            return matmul(x, self.weight.get_value(), out_dtype)
        out = matmul(x, self.weight.get_value(), jnp.float32) + self.bias[...].astype(jnp.float32)
        return out.astype(out_dtype or x.dtype)


class Embedding(nnx.Module):
    """Rows of a [vocab, features] weight; also the head of models that tie the two."""

    def __init__(self, vocab_size: int, size: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(FloatWeight(jnp.zeros((vocab_size, size), dtype)))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return take_rows(self.weight.get_value(), token_ids)

    def attend(self, x: jax.Array) -> jax.Array:
        """Products of x [n, features] with every row: [n, vocab], float32."""
        return matmul(x, self.weight.get_value(), jnp.float32)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202), gate and up in one product."""

    def __init__(self, size: int, inner_size: int, *, bias: bool, dtype: Any) -> None:
        self.gate_up_proj = Linear(size, 2 * inner_size, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner_size, size, bias=bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x, jnp.float32), 2, axis=-1)
        return self.down_proj((jax.nn.silu(gate) * up).astype(x.dtype))
