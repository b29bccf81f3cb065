"""Weights packed for the native CPU kernels (native/gemm.h): bfloat16, and GGUF's groups of 4 and 8 bits.

The kernels take x, and give results, in float32 or bfloat16 as the caller has them: converting a row costs nothing
beside reading the weights once, while a cast apart would be one more program for XLA to run. Sums are float32.

A model's weights are best joined, in their order of use: a step takes one array in place of hundreds, each of which
costs the host a microsecond or two, and threads without work fetch what the next product reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.aligned import ALIGNMENT, aligned_bytes
from pallas_kernels.matmul import packing
from pallas_kernels.matmul.fused import Norm
from pallas_kernels.matmul.layouts import Largest, Layout, register
from pallas_kernels.matmul.packing import QuantisedRows

_as_tree = partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["num_out", "num_in", "offset"])


@_as_tree
@dataclass(frozen=True)
class PackedBf16:
    """bfloat16, as bits: [out / 16, in / 2, 16, 2] uint16. `data` holds it from byte `offset` on, as all do."""

    data: jax.Array
    num_out: int
    num_in: int
    offset: int = 0


@_as_tree
@dataclass(frozen=True)
class Grouped4:
    """4 bits with a scale and a minimum for 32 inputs, [out / 16, in / 32, 320] uint8."""

    data: jax.Array
    num_out: int
    num_in: int
    offset: int = 0


@_as_tree
@dataclass(frozen=True)
class Grouped8:
    """8 bits with a scale for 32 inputs, [out / 16, in / 32, 544] uint8."""

    data: jax.Array
    num_out: int
    num_in: int
    offset: int = 0


Packed = PackedBf16 | Grouped4 | Grouped8
_Key = TypeVar("_Key")
_FORMATS = {PackedBf16: 0, Grouped4: 1, Grouped8: 2}  # the order of Format in gemm.h


def pack_floats(weight: np.ndarray) -> PackedBf16:
    """A weight [out, in] of any float type, rounded to bfloat16."""
    return PackedBf16(jnp.asarray(packing.pack_bf16(weight)), *weight.shape)


def pack_quantised(parts: Sequence[QuantisedRows]) -> Grouped4 | Grouped8 | None:
    """Rows as GGUF quantised them, stacked, without another rounding. None if their encodings don't go together."""
    encodings = {part.encoding for part in parts}
    num_out, num_in = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if encodings <= set(packing.FOUR_BITS):
        return Grouped4(jnp.asarray(packing.pack_nibbles(parts)), num_out, num_in)
    if encodings == {"Q8_0"}:
        return Grouped8(jnp.asarray(packing.pack_bytes(parts)), num_out, num_in)
    return None


def join(weights: dict[_Key, Packed]) -> dict[_Key, Packed]:
    """The weights end to end in one array, in their order. They are taken out of `weights` one by one, so that no more
    than one is in memory twice. Those that are joined already are given back; a mixture raises ValueError."""
    if not weights or any(weight.offset for weight in weights.values()):
        if len({id(weight.data) for weight in weights.values()}) > 1:
            raise ValueError("some weights are joined already, and others are not")
        return weights
    sizes = [-(-weight.data.nbytes // ALIGNMENT) * ALIGNMENT for weight in weights.values()]
    whole, alone = aligned_bytes(sum(sizes)), {}
    for name, offset in zip(list(weights), accumulate(sizes, initial=0)):
        weight = weights.pop(name)
        whole[offset : offset + weight.data.nbytes] = np.asarray(weight.data).reshape(-1).view(np.uint8)
        alone[name] = type(weight), weight.num_out, weight.num_in, offset
    data = jax.device_put(whole, may_alias=True)
    return {name: kind(data, *sizes, offset) for name, (kind, *sizes, offset) in alone.items()}


def _linear(
    x: jax.Array,
    weight: Packed,
    *,
    norm: Norm | None = None,
    bias: jax.Array | None = None,
    gated: bool = False,
    residual: jax.Array | None = None,
    fine_input: bool = False,
    out_dtype: Any = jnp.float32,
) -> Any:
    """`fused.linear` as one call."""
    if gated and weight.num_out % (2 * packing.LANES):
        return NotImplemented
    native.load()
    num_results = weight.num_out // 2 if gated else weight.num_out
    kept = out_dtype if _is_known(out_dtype) else jnp.float32
    out = jax.ffi.ffi_call("pagedjax_linear", jax.ShapeDtypeStruct((x.shape[0], num_results), kept))(
        _known(x),
        weight.data,
        _NONE if norm is None else norm.weight.astype(jnp.float32),
        _NONE if bias is None else _known(bias),
        _NONE if residual is None else _known(residual),
        **_sizes(weight),
        gated=gated,
        fine=fine_input,
        eps=np.float32(0 if norm is None else norm.eps),
    )
    return out.astype(out_dtype)


def _argmax(x: jax.Array, weight: Packed) -> Largest:
    native.load()
    shapes = [jax.ShapeDtypeStruct(x.shape[:1], dtype) for dtype in (jnp.int32, jnp.float32)]
    return Largest(*jax.ffi.ffi_call("pagedjax_argmax", shapes)(_known(x), weight.data, **_sizes(weight)))


def _take_rows(weight: Packed, ids: jax.Array) -> jax.Array:
    native.load()
    rows = jax.ShapeDtypeStruct((ids.shape[0], weight.num_in), jnp.float32)
    return jax.ffi.ffi_call("pagedjax_take_rows", rows)(weight.data, ids.astype(jnp.int32), **_sizes(weight))


_NONE = np.zeros(0, np.float32)


def _sizes(weight: Packed) -> dict[str, Any]:
    format_id = np.int32(_FORMATS[type(weight)])
    sizes = {"num_inputs": weight.num_in, "num_outputs": weight.num_out, "offset": weight.offset}
    return {"format": format_id, **{name: np.int64(size) for name, size in sizes.items()}}


def _is_known(dtype: Any) -> bool:
    return jnp.dtype(dtype) in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def _known(x: jax.Array) -> jax.Array:
    return x if _is_known(x.dtype) else x.astype(jnp.float32)


for kind in _FORMATS:
    register(kind, Layout(_linear, _take_rows, _linear, _argmax))
