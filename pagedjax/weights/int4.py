"""Directories whose weights AWQ or GPTQ has quantised to 4 bits: what config.json says of it, and each weight.

A weight "….weight" lies in several tensors, "….qweight", "….qzeros", "….scales" and GPTQ's "….g_idx"; `quant_matmul`
tells how. Embeddings, norms and mostly the head are plain. Formats: the `quantization_config` of transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pagedjax.core.errors import ConfigError
from pagedjax.models.config import ModelConfig
from pagedjax.models.fill import Pack, Part, checked
from pagedjax.weights.pack import AWQ, GPTQ, PackedWeight
from pagedjax.weights.safetensors import SafetensorFiles
from pallas_kernels.dispatch import capability_of
from pallas_kernels.matmul import QuantisedRows
from pallas_kernels.quant_matmul import Int4Tensor, from_awq, from_gptq, packing, stack

PARTS = ("qweight", "qzeros", "scales", "g_idx")
GPTQ_ORDERED = "GPTQ4 in act-order"
ENCODINGS = frozenset({AWQ, GPTQ, GPTQ_ORDERED})
ADVICE = "take the plain checkpoint, one of AWQ or GPTQ in 4 bits, or a GGUF file"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a directory is quantised. `group_size` is in inputs, None: all of a weight's inputs are one group."""

    encoding: str
    group_size: int | None
    zeros_less_one: bool = False  # GPTQ's first format

    @property
    def in_order(self) -> bool:
        return self.encoding != GPTQ_ORDERED


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """From a parsed config.json; None where it is not quantised. Raises ConfigError for what can't be read, by name."""
    quantised = config.get("quantization_config")
    if quantised is None:
        return None
    if not isinstance(quantised, Mapping):
        raise ConfigError(f"config.json: quantization_config must be an object, not {quantised!r}")
    method = quantised.get("quant_method")
    if method == "awq":
        return _awq(quantised)
    if method == "gptq":
        return _gptq(quantised)
    raise ConfigError(f"config.json: quantization by {method!r} is not supported: {ADVICE}")


def _awq(quantised: Mapping[str, Any]) -> Scheme:
    _only(quantised, "bits", quantised.get("bits", quantised.get("w_bit")), (4,))
    _only(quantised, "version", str(quantised.get("version", "gemm")).lower(), ("gemm",))
    _only(quantised, "zero_point", quantised.get("zero_point", True), (True,))
    return Scheme(AWQ, _group_size(quantised.get("group_size", quantised.get("q_group_size"))))


def _gptq(quantised: Mapping[str, Any]) -> Scheme:
    stored = quantised.get("checkpoint_format") or "gptq"
    _only(quantised, "bits", quantised.get("bits"), (4,))
    _only(quantised, "checkpoint_format", stored, ("gptq", "gptq_v2"))
    _only(quantised, "is_marlin_format", quantised.get("is_marlin_format", False), (False,))
    _only(quantised, "dynamic", quantised.get("dynamic") or None, (None,))
    encoding = GPTQ_ORDERED if quantised.get("desc_act", False) else GPTQ
    return Scheme(encoding, _group_size(quantised.get("group_size")), zeros_less_one=stored == "gptq")


def _only(quantised: Mapping[str, Any], name: str, value: Any, followed: tuple[Any, ...]) -> None:
    if value not in followed:
        method = quantised["quant_method"]
        raise ConfigError(
            f"config.json: {method} with {name} {value!r} is not supported, only {followed[0]!r}: {ADVICE}"
        )


def _group_size(value: Any) -> int | None:
    if value == -1:
        return None
    unit = 2 * packing.PAIRED
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % unit:
        raise ConfigError(f"config.json: group_size {value!r} is not supported, only -1 and multiples of {unit}")
    return value


def weight_encodings(files: SafetensorFiles, scheme: Scheme, config: ModelConfig) -> dict[str, str]:
    """How each tensor is stored, quantised weights under one name each.

    Quantisers write a bias for every weight; one of zeros that the model does not have is left out.
    """
    stems = {name.removesuffix(".qweight") for name in files.names if name.endswith(".qweight")}
    parts = {f"{stem}.{part}" for stem in stems for part in PARTS}
    missing = sorted(f"{stem}.{part}" for stem in stems for part in PARTS[:3] if f"{stem}.{part}" not in files.names)
    if missing:
        raise ConfigError(f"the checkpoint has no {missing[0]}, which belongs to a quantised weight; fetch it again")
    left_out = {f"{stem}.bias" for stem in stems if _is_idle_bias(files, stem, config)}
    plain = {name: files.encoding(name) for name in files.names - parts - left_out}
    return plain | {f"{stem}.weight": scheme.encoding for stem in stems}


def _is_idle_bias(files: SafetensorFiles, stem: str, config: ModelConfig) -> bool:
    wanted = config.attention_bias if ".self_attn." in stem else config.mlp_bias
    return not wanted and f"{stem}.bias" in files.names and not files.read(f"{stem}.bias").any()


def read_tensor(files: SafetensorFiles, scheme: Scheme, name: str) -> Int4Tensor:
    """The quantised weight `name`. Raises ConfigError, by name, for tensors that do not go together."""
    stem = name.removesuffix(".weight")
    qweight, qzeros = (files.read_integers(f"{stem}.{part}") for part in PARTS[:2])
    scales = files.read(f"{stem}.scales")
    try:
        if scheme.encoding == AWQ:
            tensor = from_awq(qweight, qzeros, scales)
        else:
            has_groups = f"{stem}.g_idx" in files.names
            g_idx = files.read_integers(f"{stem}.g_idx") if has_groups else None
            tensor = from_gptq(qweight, qzeros, scales, g_idx, zeros_less_one=scheme.zeros_less_one)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{name}: {error}; the checkpoint is corrupt or not what its config.json says") from error
    _check_groups(tensor, scheme, name)
    return tensor


def _check_groups(tensor: Int4Tensor, scheme: Scheme, name: str) -> None:
    num_in = tensor.shape[1]
    if num_in != len(tensor.scales) * (scheme.group_size or num_in):
        raise ConfigError(f"{name} has {len(tensor.scales)} groups of its {num_in} inputs; config.json says otherwise")
    if tensor.order is not None and scheme.in_order:
        raise ConfigError(f"{name} has its groups in act-order; config.json says otherwise")


def pack_for(get_int4: Callable[[str], Int4Tensor | None], *, note: Callable[[PackedWeight], None]) -> Pack:
    """What `fill` calls for each weight of a product: an Int4Weight on the first device, or None for floats.

    A product of which only some parts are quantised is floats. Calls raise ConfigError, by name, for parts that differ
    in their groups.
    """

    def pack(parts: tuple[Part, ...], dtype: Any) -> Any:
        tensors = [checked(tensor, part) for part in parts if (tensor := get_int4(part.name)) is not None]
        if len(tensors) != len(parts):
            return None
        device = jax.devices()[0]
        try:
            packed = stack(tensors, platform=device.platform, capability=capability_of(device))
        except ValueError as error:
            names = ", ".join(part.name for part in parts)
            raise ConfigError(f"{names}: {error}; set --quantization none to dequantise them") from error
        note(PackedWeight(parts[0].name, frozenset({"AWQ/GPTQ"}), "4 bits", packed.num_in * packed.num_out, 0.0, 0.0))
        return packed

    return pack


def as_rows(tensor: Int4Tensor) -> QuantisedRows | None:
    """The weight in GGUF's Q4_1 for native kernels: each scale as it is, each minimum -zero * scale in float16.

    None where the inputs are reordered or a number does not fit float16.
    """
    minima = -(tensor.zeros * tensor.scales.astype(np.float32))
    scales, minima = tensor.scales.astype(np.float16), minima.astype(np.float16)
    if tensor.order is not None or not (np.isfinite(scales).all() and np.isfinite(minima).all()):
        return None
    num_blocks = tensor.shape[1] // (2 * packing.PAIRED)
    spread = num_blocks // len(scales)
    # [blocks of inputs, …, out] -> [out, blocks of inputs, …]: both pack inputs 16 apart into a byte.
    bytes_of = [
        np.repeat(x, spread, axis=0).T[..., None].view(np.uint8) for x in map(np.asfortranarray, (scales, minima))
    ]
    quants = tensor.quants.reshape(num_blocks, packing.PAIRED, -1).transpose(2, 0, 1)
    return QuantisedRows("Q4_1", np.concatenate([*bytes_of, quants], axis=-1))
