"""What a provider gives: cases, each one program to compile, with what must be found in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

TENSOR_CORES = ("wgmma", "mma")  # either will do


class Program(NamedTuple):
    """A function (jitted or not) and its arguments: pytrees of ShapeDtypeStruct.

    Arguments without a sharding are replicated. `donated` are positions; of a jitted function it has no effect.
    `options` are further keywords of `jax.jit`.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    options: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Case:
    """One program on one kind of GPU.

    `kernels` maps the name of each kernel that must be there to what it must use: groups of names from
    `reading.INSTRUCTIONS`, of each group at least one. `cache` is the position of the argument that is the KV cache:
    all of it must be aliased with an output, and nothing new may be as large as one layer of its largest leaf, which
    holds `num_layers`, or just as large as any leaf. `thunks` are kinds that must be there. XLA's own kernels are not
    judged.
    A case with `refused` is recorded with that reason and not compiled. `quick` ones make up the short gate.
    """

    op: str
    backend: str
    shape: str  # in words, with the dtype
    build: Callable[[Mesh], Program]
    topology: str = "1x1x1"
    target: str = "h200"
    kernels: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    thunks: tuple[str, ...] = ()
    cache: int | None = None
    num_layers: int = 1
    refused: str | None = None
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.op} {self.backend} {self.target} {self.shape}"


def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An argument of that shape."""
    return jax.ShapeDtypeStruct(shape, dtype)
