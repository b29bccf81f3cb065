"""Whether a model's weights stay quantised, are quantised as they are loaded, or are dequantised: and why."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pagedjax.core.errors import ConfigError
from pagedjax.engine.config import Quantization
from pagedjax.weights import int4
from pagedjax.weights.pack import Layout
from pallas_kernels import matmul, native

# How GGML names encodings by groups: Q4_1, IQ4_NL, TQ2_0, MXFP4.
_QUANTISED = ("Q", "IQ", "TQ", "MXFP")


class WeightChoice(NamedTuple):
    """A model's layout, the reason for it, and those against the ones before it in order of preference."""

    layout: Layout
    reason: str
    refused: Mapping[str, str]


def choose_layout(
    quantization: Quantization, *, asked_dtype: str, dtype: Any, encodings: Iterable[str]
) -> WeightChoice:
    """For a checkpoint stored in `encodings` and a model that computes in `dtype`, of which `asked_dtype` was said.

    A file's own groups stay where nothing else was asked for. Raises ConfigError where `quantization` asks for what
    cannot be had here, and for a variable of the environment that means nothing.
    """
    try:
        missing = native.unavailable()
        if quantization in ("int8", "int4"):
            return _asked(quantization, missing)
        quantised = sorted({name for name in encodings if name.startswith(_QUANTISED) or name in int4.ENCODINGS})
        against = _against_groups(quantization, asked_dtype, quantised)
        choice = matmul.preferred(dtype, not_grouped=against)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if quantization == "auto" and choice.name != "grouped" and not int4.ENCODINGS.isdisjoint(quantised):
        return WeightChoice("w4a16", _kept(quantised), MappingProxyType({"grouped": choice.refused["grouped"]}))
    return WeightChoice(choice.name, _reason(choice, quantised), choice.refused)


def _asked(quantization: Literal["int8", "int4"], missing: str | None) -> WeightChoice:
    if missing is None:
        return WeightChoice(quantization, "it is asked for", MappingProxyType({}))
    reasons, against = [f"it needs the native kernels: {missing}"], matmul.not_in_rows()
    if quantization == "int8":
        if against is None:
            return WeightChoice("int8_rows", "int8 is asked for", MappingProxyType({"int8": reasons[0]}))
        reasons.append(f"and as for rows of 8 bits, {against}")
    others = "none" if against else "int8 or none"
    raise ConfigError(f"quantization {quantization} cannot be had: {'; '.join(reasons)}; set --quantization {others}")


def _against_groups(quantization: Quantization, asked_dtype: str, quantised: list[str]) -> str | None:
    if not quantised:
        return "the checkpoint is not quantised"
    if quantization == "none":
        return "quantization none is asked for"
    if int4.GPTQ_ORDERED in quantised:
        return "native kernels have no groups in act-order"
    return None if asked_dtype == "auto" else f"dtype {asked_dtype} is asked for"


def _kept(quantised: list[str]) -> str:
    return f"the checkpoint is quantised ({', '.join(quantised)})"


def _reason(choice: matmul.LayoutChoice, quantised: list[str]) -> str:
    if choice.name in ("grouped", "int8_rows"):
        return _kept(quantised)
    # A reason against both is the native kernels' absence.
    return choice.refused["packed_bf16" if choice.name == "float" else "grouped"]
