"""Whole blocks in and out of the cache and within it, by programs of a few sizes.

Ids that no block has are refused here, on the host: the programs would skip them in silence.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.errors import SchedulerError
from pagedjax.runtime.programs import Job, Programs, shape_of
from pagedjax.runtime.swap import Piece, split_sizes
from pallas_kernels.block_copy import CopyBackend, staging_for

Pairs = Sequence[tuple[int, int]]
# One size is enough within the cache: padding costs no memory there.
_COPY_SIZE = 16


def jobs(caches: Any, backend: CopyBackend, sizes: Iterable[int], *, swaps: bool) -> Iterator[Job]:
    """The programs to compile: copies within the cache, and if blocks are swapped, those to and from staging."""
    ids = jax.ShapeDtypeStruct((_COPY_SIZE,), jnp.int32)
    yield _job("copy", _COPY_SIZE, backend.copy, (caches, ids, ids), donate=0)
    for size in sizes if swaps else ():
        ids, staging = jax.ShapeDtypeStruct((size,), jnp.int32), staging_for(caches, size)
        yield _job("gather", size, backend.gather, (caches, ids))
        yield _job("scatter", size, backend.scatter, (caches, staging, ids), donate=0)


def gather(programs: Programs, caches: Any, block_ids: Sequence[int], sizes: Sequence[int]) -> list[Piece]:
    """Copies of blocks in staging arrays, in order."""
    _check(block_ids, caches)
    pieces, first = [], 0
    for size, used in split_sizes(len(block_ids), sizes):
        ids = _padded(block_ids[first : first + used], size)
        pieces.append(Piece(programs["gather", size](caches, ids), used))
        first += used
    return pieces


def scatter(programs: Programs, caches: Any, pieces: Iterable[Piece], pairs: Pairs) -> Any:
    """The caches (donated) with staged block `index` as block `target` for each pair (index, target)."""
    target_of = dict(pairs)
    _check(target_of.values(), caches)
    first = 0
    for staging, num_blocks in pieces:
        targets = [target_of.pop(index, -1) for index in range(first, first + num_blocks)]
        first += num_blocks
        if max(targets) >= 0:
            size = staging.shape[0]
            caches = programs["scatter", size](caches, staging, _padded(targets, size))
    if target_of:
        raise SchedulerError(f"staged blocks {sorted(target_of)} of {first} are asked for")
    return caches


def copy(programs: Programs, caches: Any, pairs: Pairs) -> Any:
    """The caches (donated) with block `source` as block `target` for each pair. No source is a target."""
    _check([block_id for pair in pairs for block_id in pair], caches)
    program = programs["copy", _COPY_SIZE]
    for first in range(0, len(pairs), _COPY_SIZE):
        sources, targets = zip(*pairs[first : first + _COPY_SIZE])
        caches = program(caches, _padded(sources, _COPY_SIZE), _padded(targets, _COPY_SIZE))
    return caches


def _job(name: str, size: int, function: Callable[..., Any], inputs: tuple[Any, ...], donate: int | None = None) -> Job:
    def named(*values: Any) -> Any:
        return function(*values)

    named.__name__ = f"{name}_{size}_blocks"
    return Job(name, size, jax.jit(named, donate_argnums=donate), jax.tree.map(shape_of, inputs))


def _padded(block_ids: Sequence[int], size: int) -> np.ndarray:
    padded = np.full(size, -1, np.int32)
    padded[: len(block_ids)] = block_ids
    return padded


def _check(block_ids: Iterable[int], caches: Any) -> None:
    num_blocks = jax.tree.leaves(caches)[0].shape[0]
    wrong = [block_id for block_id in block_ids if not 0 <= block_id < num_blocks]
    if wrong:
        raise SchedulerError(f"block ids {wrong} are not all in 0..{num_blocks - 1}")
