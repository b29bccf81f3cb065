"""Which form each weight of a checkpoint gets, by the layout that was chosen for the model, and what that costs.

"packed_bf16" rounds every weight to bfloat16. "grouped" keeps the file's own groups of 4 and 8 bits bit for bit; other
encodings (Q5_0, Q5_1, K-quants …), and parts of one product in several, become 8 bits, which are finer; where a part is
no group at all, all parts are bfloat16. Weights of AWQ and GPTQ become Q4_1 there (`int4.as_rows`), while "w4a16" keeps
them as they are and all else as floats (`int4.pack_for`). "int8" and "int4" round what is not in such groups yet, 32
inputs to a scale; embeddings and the head are kept finer: in bfloat16 beside 8 bits, in 8 bits beside 4. "int8_rows"
rounds all but those to 8 bits with a scale a row. Norms and biases are no products' weights and stay floats always.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from pagedjax.core.errors import ConfigError
from pagedjax.models.fill import Pack, Part, checked
from pallas_kernels.matmul import Int8Rows, QuantisedRows, pack_floats, pack_quantised, packing, round_rows

Layout = Literal["float", "packed_bf16", "grouped", "int8", "int4", "int8_rows", "w4a16"]
Form = Literal["bfloat16", "8 bits", "4 bits", "rows of 8 bits", "floats"]

PLAIN = frozenset({"F32", "F16", "BF16"})
# In groups of their own kind, which fit Q4_1.
AWQ, GPTQ = "AWQ4", "GPTQ4"
FINER = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
_KEPT: Mapping[str, tuple[str, ...]] = {"8 bits": ("Q8_0",), "4 bits": packing.FOUR_BITS}
_ROUND: Mapping[str, Callable[[np.ndarray], QuantisedRows]] = {
    "8 bits": packing.quantise_bytes,
    "4 bits": packing.quantise_nibbles,
}
# Rounding in pieces keeps its temporaries small beside the result.
PIECE_ELEMENTS = 1 << 22
# One row of so many is compared with what became of it.
SAMPLED = 16


class PackedWeight(NamedTuple):
    """What became of one product's weight.

    `encodings` are those of its parts in the file. `squared_error` and `squared` are sums over a sample of what was
    rounded to groups here, 0 where nothing was.
    """

    name: str
    encodings: frozenset[str]
    form: Form
    num_weights: int
    squared_error: float
    squared: float


def pack_for(
    get: Callable[[str], np.ndarray],
    get_quantised: Callable[[str], QuantisedRows | None],
    encodings: Mapping[str, str],
    layout: Layout,
    *,
    note: Callable[[PackedWeight], None],
) -> Pack | None:
    """What `fill` calls for each weight of a product; None for "float". `note` is told of each.

    Calls raise ConfigError, by name, for a weight whose rows are no whole groups.
    """
    if layout == "float":
        return None

    def pack(parts: tuple[Part, ...], dtype: Any) -> Any:
        form = choose_form(layout, parts, [encodings[part.name] for part in parts])
        if form == "floats":
            return None
        if form == "bfloat16":
            packed: Any = pack_floats(_joined(parts, get))
            sums = np.zeros(2)
        elif form == "rows of 8 bits":
            values = _joined(parts, get)
            packed = round_rows(values)
            sums = _row_sums(values, packed)
        else:
            rounded = [_in_groups(part, form, get, get_quantised) for part in parts]
            packed = pack_quantised([rows for rows, _ in rounded])
            sums = np.sum([each for _, each in rounded], axis=0)
        stored = frozenset(encodings[part.name] for part in parts)
        num_weights = sum(math.prod(part.shape) for part in parts)
        note(PackedWeight(parts[0].name, stored, form, num_weights, *sums.tolist()))
        return packed

    return pack


def choose_form(layout: Layout, parts: Sequence[Part], encodings: Sequence[str]) -> Form:
    """The form of a weight made of `parts`, which the file holds in `encodings`."""
    is_finer = any(part.name in FINER for part in parts)
    if layout == "int8_rows":
        return "floats" if is_finer else "rows of 8 bits"
    if layout == "int4":
        return "8 bits" if is_finer else "4 bits"
    if layout == "int8":
        return "bfloat16" if is_finer and set(encodings) != {"Q8_0"} else "8 bits"
    if layout != "grouped" or not PLAIN.isdisjoint(encodings):
        return "bfloat16"
    return "4 bits" if set(encodings) <= {*packing.FOUR_BITS, AWQ, GPTQ} else "8 bits"


def describe(weights: Iterable[PackedWeight]) -> str:
    """How many weights have which form, from which encodings, and the error of those that were rounded to groups."""
    sums: dict[tuple[str, str], np.ndarray] = {}
    for weight in weights:
        key = weight.form, "+".join(sorted(weight.encodings))
        sums[key] = sums.get(key, 0) + np.array([weight.num_weights, weight.squared_error, weight.squared])
    return "; ".join(_line(*key, *values.tolist()) for key, values in sorted(sums.items()))


def _line(form: str, encodings: str, num_weights: float, squared_error: float, squared: float) -> str:
    error = f", error {math.sqrt(squared_error / squared):.2%}" if squared else ""
    return f"{num_weights / 1e6:.1f}M {encodings} in {form}{error}"


def _in_groups(
    part: Part, form: Form, get: Callable[[str], np.ndarray], get_quantised: Callable[[str], QuantisedRows | None]
) -> tuple[QuantisedRows, np.ndarray]:
    """The part in groups, as the file has them if it does, and the sums of a PackedWeight."""
    found = get_quantised(part.name)
    if found is not None and found.encoding in _KEPT[form]:
        return checked(found, part), np.zeros(2)
    values = checked(get(part.name), part)
    if part.shape[1] % packing.GROUP:
        raise ConfigError(
            f"{part.name} has {part.shape[1]} inputs, no multiple of {packing.GROUP}: it cannot be quantised by "
            "groups; set --quantization none"
        )
    step = max(1, PIECE_ELEMENTS // part.shape[1] // SAMPLED) * SAMPLED
    pieces = [values[start : start + step] for start in range(0, len(values), step)]
    rounded = [_ROUND[form](piece) for piece in pieces]
    sums = np.sum([_sums(piece, rows) for piece, rows in zip(pieces, rounded)], axis=0)
    return QuantisedRows(rounded[0].encoding, np.concatenate([rows.blocks for rows in rounded])), sums


def _joined(parts: Sequence[Part], get: Callable[[str], np.ndarray]) -> np.ndarray:
    tensors = [checked(get(part.name), part) for part in parts]
    return np.concatenate(tensors) if len(tensors) > 1 else tensors[0]


def _row_sums(values: np.ndarray, rounded: Int8Rows) -> np.ndarray:
    sample = slice(None, None, SAMPLED)
    rows = np.asarray(rounded.rows)[sample] * np.asarray(rounded.own_scales)[sample, None]
    return _sums_of(rows, values[sample])


def _sums(values: np.ndarray, rows: QuantisedRows) -> np.ndarray:
    sample = packing.dequantise(QuantisedRows(rows.encoding, rows.blocks[::SAMPLED]))
    return _sums_of(sample, values[::SAMPLED])


def _sums_of(rounded: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The last two of a PackedWeight."""
    exact = values.astype(np.float32)
    return np.array([np.square(part, dtype=np.float64).sum() for part in (rounded - exact, exact)])
