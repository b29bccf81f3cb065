"""What every backend of the product with 4-bit weights takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

# Inputs i and i + PAIRED, in each block of twice as many, share a byte. A kernel's tile holds whole blocks, and the
# two halves of its bytes are 16 inputs apiece: the depth of one tensor-core product.
PAIRED = 16


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["quants", "scales", "zeros", "order"],
    meta_fields=["platform", "capability"],
)
@dataclass(frozen=True)
class Int4Weight:
    """A weight [out, in] of values (quant - zero) * scale, with a scale and a zero for each output and group of inputs.

    Groups are of equal size, a multiple of 32. Where `order` is given, place p holds input `order[p]`, and groups are
    of places (GPTQ's act-order). `platform` and `capability` are of the device that it lies on, for `choose`.
    """

    quants: jax.Array  # [in / 2, out] uint8; byte 16 b + r: places 32 b + r (low bits) and 32 b + 16 + r
    scales: jax.Array  # [in / group_size, out] floating
    zeros: jax.Array  # [in / group_size, out] uint8, 0 to 16
    order: jax.Array | None  # [in] int32
    platform: str = "cpu"
    capability: tuple[int, int] | None = None

    @property
    def num_in(self) -> int:
        return 2 * self.quants.shape[0]

    @property
    def num_out(self) -> int:
        return self.quants.shape[1]

    @property
    def group_size(self) -> int:
        return self.num_in // self.scales.shape[0]


@dataclass(frozen=True, slots=True)
class QuantNeed:
    """All that a backend may refuse for. `dtype` is that of the activations; see `dispatch` for the others."""

    platform: str
    num_tokens: int
    num_in: int
    num_out: int
    group_size: int
    dtype: Any
    capability: tuple[int, int] | None = None


class QuantBackend(NamedTuple):
    """`multiply(x [tokens, in], weight)` gives x @ weight.T, [tokens, out] in float32."""

    name: str
    multiply: Callable[[jax.Array, Int4Weight], jax.Array]
