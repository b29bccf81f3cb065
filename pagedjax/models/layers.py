"""The parts that decoder models are made of. Activations are [tokens, features] in the model's dtype."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.matmul import FloatWeight, Norm, linear, matmul, rms_norm, take_rows


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, in float32 (arXiv:1910.07467). The weight stays float32: it is small."""

    def __init__(self, size: int, eps: float) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.numbers)

    @property
    def numbers(self) -> Norm:
        """For a product that norms its own input."""
        return Norm(self.weight[...], self.eps)


class Linear(nnx.Module):
    """x @ weight.T + bias. The weight is a value of some layout, [out, in] when plain.

    `fine_input`, and what a call may ask for beside the product, are those of `matmul.linear`; norm is an RMSNorm.
    Where the inputs are split over a mesh axis, `sum_over` names it: each shard has a part of every sum.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        bias: bool,
        dtype: Any,
        fine_input: bool = False,
        sum_over: str | None = None,
    ) -> None:
        self.weight = nnx.Param(FloatWeight(jnp.zeros((num_out, num_in), dtype)))
        self.bias = nnx.Param(jnp.zeros(num_out, dtype)) if bias else None
        self.fine_input, self.sum_over = fine_input, sum_over

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: RMSNorm | None = None,
        gated: bool = False,
        residual: jax.Array | None = None,
        out_dtype: Any = None,
    ) -> jax.Array:
        if self.sum_over is not None:
            return self._summed(x, residual)
        return linear(
            x,
            self.weight.get_value(),
            norm=None if norm is None else norm.numbers,
            bias=None if self.bias is None else self.bias[...],
            gated=gated,
            residual=residual,
            fine_input=self.fine_input,
            out_dtype=out_dtype,
        )

    def _summed(self, x: jax.Array, residual: jax.Array | None) -> jax.Array:
        """The shards' parts summed, in x's dtype; bias and residual count once."""
        out = jax.lax.psum(linear(x, self.weight.get_value(), fine_input=self.fine_input), self.sum_over)
        if self.bias is not None:
            out = out + self.bias[...]
        return out if residual is None else residual + out


class Embedding(nnx.Module):
    """Rows of a [vocab, features] weight, in `dtype`; also the head of models that tie the two."""

    def __init__(self, vocab_size: int, size: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(FloatWeight(jnp.zeros((vocab_size, size), dtype)))
        self.dtype = dtype

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return take_rows(self.weight.get_value(), token_ids).astype(self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Products of x [n, features] with every row: [n, vocab], float32."""
        return matmul(x, self.weight.get_value(), jnp.float32)


class SwiGLU(nnx.Module):
    """residual + down(silu(gate(norm(x))) * up(norm(x))) (arXiv:2002.05202), gate and up in one product.

    What goes into `down` has outliers hundreds of times as large as the rest.
    """

    def __init__(self, size: int, inner_size: int, *, bias: bool, dtype: Any, sum_over: str | None = None) -> None:
        self.gate_up_proj = Linear(size, 2 * inner_size, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner_size, size, bias=bias, dtype=dtype, fine_input=True, sum_over=sum_over)

    def __call__(self, x: jax.Array, *, norm: RMSNorm, residual: jax.Array) -> jax.Array:
        return self.down_proj(self.gate_up_proj(x, norm=norm, gated=True), residual=residual)
