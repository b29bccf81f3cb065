"""The definition of block copy, by indexing. XLA makes good kernels of it for GPUs.

Leaves keep their own type: to index them as integers would copy the cache once more. (XLA:CPU of JAX 0.10 moves half
precision through float32 here, which changes the bits of some NaN; CPUs use the loop.)
"""

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_copy.interface import CopyBackend, from_words, is_real, num_words, staging_for, to_words


def gather(caches: Any, block_ids: jax.Array) -> jax.Array:
    """See `CopyBackend`."""
    word, real = staging_for(caches, 1).dtype, is_real(block_ids, caches)
    blocks = [leaf[jnp.where(real, block_ids, 0)] for leaf in jax.tree.leaves(caches)]
    staging = jnp.concatenate([to_words(x, word) for x in blocks], axis=1)
    return jnp.where(real[:, None], staging, jnp.zeros((), word))


def scatter(caches: Any, staging: jax.Array, block_ids: jax.Array) -> Any:
    """See `CopyBackend`."""
    leaves, tree = jax.tree.flatten(caches)
    ends = list(accumulate(num_words(leaf, staging.dtype) for leaf in leaves))
    parts = jnp.split(staging, ends[:-1], axis=1)
    blocks = [from_words(part, leaf) for part, leaf in zip(parts, leaves)]
    return tree.unflatten([_put(leaf, x, block_ids) for leaf, x in zip(leaves, blocks)])


def copy(caches: Any, sources: jax.Array, targets: jax.Array) -> Any:
    """See `CopyBackend`."""
    real = is_real(sources, caches)
    sources, targets = jnp.where(real, sources, 0), jnp.where(real, targets, -1)
    return jax.tree.map(lambda leaf: _put(leaf, leaf[sources], targets), caches)


def _put(leaf: jax.Array, blocks: jax.Array, block_ids: jax.Array) -> jax.Array:
    # A negative index would wrap to the end; only one past the end is dropped.
    return leaf.at[jnp.where(block_ids < 0, leaf.shape[0], block_ids)].set(blocks, mode="drop")


BACKEND = CopyBackend("reference", gather, scatter, copy)
