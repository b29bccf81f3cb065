"""Bugs planted in kernels: a piece of a function's source, and what stands there instead."""

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax


class Mutant(NamedTuple):
    function: Callable[..., Any]
    old: str
    new: str


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The kernels with that bug, wherever the function has been imported to."""
    source = inspect.getsource(mutant.function)
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.function.__name__} has not just one {mutant.old!r} to replace")
    space = dict(mutant.function.__globals__)
    exec(compile(source.replace(mutant.old, mutant.new), "<mutant>", "exec"), space)
    assert isinstance(mutant.function, types.FunctionType)
    sound, mutant.function.__code__ = mutant.function.__code__, space[mutant.function.__name__].__code__
    jax.clear_caches()  # of what was traced before
    try:
        yield
    finally:
        mutant.function.__code__ = sound
        jax.clear_caches()
