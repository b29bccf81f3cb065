"""Block copy as a loop over the real blocks, one slice a leaf and turn: the fast way on XLA:CPU.

A turn moves a block's run of bytes by memory copies, padding takes no turn, and the cache is the loop's carry, so it
stays in place without temporaries. Indexing the other way costs XLA:CPU a select over every element and as much memory
again as is moved: 64 blocks of 368 KB are scattered in 1.6 ms against 6.6 (2-core EPYC).

Bytes: each block read once and written once. Limits: none on shapes or types. Before JAX 0.11 XLA:CPU gives NaNs of
bfloat16 bits of its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_copy import reference
from pallas_kernels.block_copy.interface import CopyBackend, from_words, is_real, num_words, staging_for, to_words


def gather(caches: Any, block_ids: jax.Array) -> jax.Array:
    """See `CopyBackend`."""
    leaves, shape = jax.tree.leaves(caches), staging_for(caches, block_ids.shape[0])

    def move(row: jax.Array, staging: jax.Array) -> jax.Array:
        for leaf, start in _with_starts(leaves, shape.dtype):
            words = to_words(_block(leaf, block_ids[row]), shape.dtype)
            staging = lax.dynamic_update_slice(staging, words, (row, start))
        return staging

    return _each(is_real(block_ids, caches), move, jnp.zeros(shape.shape, shape.dtype))


def scatter(caches: Any, staging: jax.Array, block_ids: jax.Array) -> Any:
    """See `CopyBackend`."""
    leaves, tree = jax.tree.flatten(caches)

    def move(row: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
        found = []
        for leaf, start in _with_starts(leaves, staging.dtype):
            words = lax.dynamic_slice(staging, (row, start), (1, num_words(leaf, staging.dtype)))
            found.append(lax.dynamic_update_slice_in_dim(leaf, from_words(words, leaf), block_ids[row], 0))
        return found

    return tree.unflatten(_each(is_real(block_ids, caches), move, leaves))


def copy(caches: Any, sources: jax.Array, targets: jax.Array) -> Any:
    """See `CopyBackend`. By indexing: as fast within the cache, and compiled in a tenth of the time."""
    if sources.shape[0] == 1:  # XLA turns a scatter of one row into a slice update that copies the cache
        sources, targets = (jnp.concatenate([ids, jnp.full_like(ids, -1)]) for ids in (sources, targets))
    return reference.copy(caches, sources, targets)


def _each(real: jax.Array, move: Callable[..., Any], carry: Any) -> Any:
    """`carry` after `move(row, carry)` for every real row."""
    rows = jnp.nonzero(real, size=real.shape[0], fill_value=0)[0]
    return lax.fori_loop(0, jnp.sum(real, dtype=jnp.int32), lambda i, carry: move(rows[i], carry), carry)


def _block(leaf: jax.Array, block_id: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(leaf, block_id, 1)


def _with_starts(leaves: list[jax.Array], word: Any) -> Iterator[tuple[jax.Array, int]]:
    """Each leaf, and the word at which it starts in a row of staging."""
    start = 0
    for leaf in leaves:
        yield leaf, start
        start += num_words(leaf, word)


BACKEND = CopyBackend("loop", gather, scatter, copy)
