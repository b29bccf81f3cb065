"""What every backend of block copy takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclass(frozen=True)
class CopyBackend:
    """One way to run the op. `caches` is a pytree of leaves whose axis 0 counts blocks.

    `gather(caches, block_ids)` gives staging [n, words]: row i holds block `block_ids[i]` of every leaf, one after the
    other; zeros where there is no such block.
    `scatter(caches, staging, block_ids)` gives the caches with row i of `staging` as block `block_ids[i]`.
    `copy(caches, sources, targets)` gives the caches with block `sources[i]` as block `targets[i]`, all read before any
    is written.
    Ids are int32 [n]. One outside 0 .. num_blocks - 1 is padding: nothing is read or written for it. Targets are
    distinct. The caches are updated in place when the caller's jit donates them.
    """

    name: str
    gather: Callable[[Any, jax.Array], jax.Array]
    scatter: Callable[[Any, jax.Array, jax.Array], Any]
    copy: Callable[[Any, jax.Array, jax.Array], Any]


def staging_for(caches: Any, num_blocks: int) -> jax.ShapeDtypeStruct:
    """The staging array of `num_blocks` blocks: [num_blocks, words], of the largest words that every leaf is made of.
    `caches` may hold arrays or shapes."""
    leaves = jax.tree.leaves(caches)
    itemsize = min(_itemsize(leaf) for leaf in leaves)
    num_bytes = sum(_itemsize(leaf) * int(np.prod(leaf.shape[1:])) for leaf in leaves)
    return jax.ShapeDtypeStruct((num_blocks, num_bytes // itemsize), _WORDS[itemsize])


def to_words(blocks: jax.Array, word: Any) -> jax.Array:
    """[n, …] blocks of a leaf as [n, words], bit for bit."""
    return lax.bitcast_convert_type(blocks, word).reshape(blocks.shape[0], -1)


def from_words(words: jax.Array, leaf: jax.Array) -> jax.Array:
    """[n, words] as blocks of `leaf`, bit for bit."""
    ratio = leaf.dtype.itemsize // words.dtype.itemsize
    inner = (ratio,) if ratio > 1 else ()
    return lax.bitcast_convert_type(words.reshape(words.shape[0], *leaf.shape[1:], *inner), leaf.dtype)


def num_words(leaf: jax.Array, word: Any) -> int:
    """Words of one block of a leaf."""
    return int(np.prod(leaf.shape[1:])) * leaf.dtype.itemsize // jnp.dtype(word).itemsize


def is_real(block_ids: jax.Array, caches: Any) -> jax.Array:
    """Which ids [n] are blocks, and no padding."""
    return (block_ids >= 0) & (block_ids < jax.tree.leaves(caches)[0].shape[0])


def _itemsize(leaf: Any) -> int:
    itemsize = jnp.dtype(leaf.dtype).itemsize
    if itemsize not in _WORDS:
        raise NotImplementedError(f"blocks of {leaf.dtype} cannot be copied")
    return itemsize
