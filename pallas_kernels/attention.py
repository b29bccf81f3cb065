"""What the attention ops have in common: shapes of a model, what its attention adds, what a backend may refuse."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from pallas_kernels.kv_blocks import LIMITS


class AttentionShape(NamedTuple):
    """What stays the same from step to step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """What a model's attention adds to the plain one, and how its cache is kept.

    `kv_dtype` None: in the computing type; "int8" or "float8_e4m3fn": quantised, with scales. Raises ValueError for
    others.
    """

    window: bool = False
    softcap: bool = False
    sinks: bool = False
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.kv_dtype is not None and self.kv_dtype not in LIMITS:
            raise ValueError(f"a cache cannot be quantised to {self.kv_dtype!r}, only to {' or '.join(LIMITS)}")

    def parts(self) -> tuple[str, ...]:
        """What is asked for beyond plain attention, in words."""
        named = {
            "a sliding window": self.window,
            "a soft-cap": self.softcap,
            "attention sinks": self.sinks,
            f"a cache in {self.kv_dtype}": self.kv_dtype is not None,
        }
        return tuple(words for words, wanted in named.items() if wanted)


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """Where a backend is to run, and on what: all that it may refuse for.

    `platform` is JAX's ("cpu", "gpu"), `dtype` a numpy dtype: that of q, k, v and out. `capability` is the GPU's
    compute capability; None: unknown, or no GPU.
    """

    platform: str
    shape: AttentionShape
    dtype: Any
    variant: AttentionVariant = AttentionVariant()
    capability: tuple[int, int] | None = None


class Scoring(NamedTuple):
    """How scores become weights, as backends hand it down: `AttentionBackend` says what each does."""

    scale: float
    window: int | jax.Array | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None  # [heads] float32
