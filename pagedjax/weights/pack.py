"""Which layout each weight of a checkpoint gets."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from pagedjax.models.fill import Pack, Part, checked
from pallas_kernels.matmul import QuantisedRows, pack_floats, pack_quantised

Layout = Literal["float", "packed_bf16", "grouped"]


def pack_for(
    get: Callable[[str], np.ndarray], get_quantised: Callable[[str], QuantisedRows | None], layout: Layout
) -> Pack | None:
    """What `fill` calls for each weight of a product; None for "float"."""
    if layout == "float":
        return None

    def pack(parts: tuple[Part, ...], dtype: Any) -> Any:
        if layout == "grouped":
            found = [get_quantised(part.name) for part in parts]
            rows = [checked(tensor, part) for tensor, part in zip(found, parts) if tensor is not None]
            packed = pack_quantised(rows) if len(rows) == len(parts) else None
            if packed is not None:
                return packed
        tensors = [checked(get(part.name), part) for part in parts]
        return pack_floats(np.concatenate(tensors) if len(tensors) > 1 else tensors[0])

    return pack
