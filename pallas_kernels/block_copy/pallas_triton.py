"""Block copy as Pallas Triton kernels: all leaves of all layers in one pass, between the caches and staging.

Grid (row of staging, chunk): a program moves the same chunk of every leaf's block, so that a swap of 32 layers is a few
kernels in place of 64 gathers and a concatenation, at any number of blocks. Chunks are `tile_words` words. Leaves of
wider numbers than a word (scales beside int8) are taken apart and put together in registers. Up to `max_leaves` leaves
go into one kernel. A copy within the caches is a gather and a scatter, since all is read before any is written.

Bytes: each block read once and written once; a copy within the caches twice. Limits: as `staging_for`, and wide leaves
of 4 bytes at most. Ids out of range are masked off in the kernel.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.block_copy.interface import CopyBackend, num_words, staging_for
from pallas_kernels.block_copy.tiles import CopyTiles, copy_tiles
from pallas_kernels.triton import check_offsets, plt

_ANY = pl.BlockSpec(memory_space=pl.ANY)
_BITS = {2: jnp.uint16, 4: jnp.uint32}


def gather(caches: Any, block_ids: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See `CopyBackend`."""
    leaves, tiles, shape = jax.tree.leaves(caches), copy_tiles(), staging_for(caches, block_ids.shape[0])
    staging: tuple[jax.Array, ...] = ()  # made by the first kernel, filled further by the others
    for part, start in _parts(leaves, shape.dtype, tiles):
        flat = [_flat(leaf) for leaf in part]
        staging = _call(
            partial(_gather_kernel, num_leaves=len(flat), tiles=tiles),
            (block_ids, start, *flat, *staging),
            (shape,),
            {2 + len(flat): 0} if staging else {},
            _grid(part, block_ids, tiles),
            interpret,
        )
    return staging[0]


def scatter(caches: Any, staging: jax.Array, block_ids: jax.Array, *, interpret: bool = False) -> Any:
    """See `CopyBackend`."""
    (leaves, tree), tiles, written = jax.tree.flatten(caches), copy_tiles(), []
    for part, start in _parts(leaves, staging.dtype, tiles):
        flat = [_flat(leaf) for leaf in part]
        new = _call(
            partial(_scatter_kernel, tiles=tiles),
            (block_ids, start, staging, *flat),
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat),
            {3 + i: i for i in range(len(flat))},
            _grid(part, block_ids, tiles),
            interpret,
        )
        written += [x.reshape(leaf.shape) for x, leaf in zip(new, part)]
    return tree.unflatten(written)


def copy(caches: Any, sources: jax.Array, targets: jax.Array, *, interpret: bool = False) -> Any:
    """See `CopyBackend`."""
    num_blocks = jax.tree.leaves(caches)[0].shape[0]
    targets = jnp.where((sources >= 0) & (sources < num_blocks), targets, -1)
    return scatter(caches, gather(caches, sources, interpret=interpret), targets, interpret=interpret)


def _call(
    kernel: Any,
    operands: tuple[jax.Array, ...],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    aliases: dict[int, int],
    grid: tuple[int, ...],
    interpret: bool,
) -> tuple[jax.Array, ...]:
    outcome: tuple[jax.Array, ...] = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[_ANY] * len(operands),
        out_specs=[_ANY] * len(outputs),
        out_shape=list(outputs),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="block_copy",
    )(*operands)
    return tuple(outcome)


def _parts(leaves: list[jax.Array], word: Any, tiles: CopyTiles) -> Iterator[tuple[list[jax.Array], jax.Array]]:
    """Runs of leaves for one kernel each, and the word of staging at which they start, [1]: an operand, so that runs
    of equal leaves are one kernel to compile."""
    start = 0
    for first in range(0, len(leaves), tiles.max_leaves):
        part = leaves[first : first + tiles.max_leaves]
        yield part, jnp.full(1, start, jnp.int32)
        start += sum(num_words(leaf, word) for leaf in part)


def _flat(leaf: jax.Array) -> jax.Array:
    check_offsets(leaf)
    return leaf.reshape(leaf.shape[0], -1)


def _grid(part: list[jax.Array], block_ids: jax.Array, tiles: CopyTiles) -> tuple[int, int]:
    """(rows, chunks of the longest leaf)"""
    return block_ids.shape[0], pl.cdiv(max(leaf[0].size for leaf in part), tiles.tile_words)


def _gather_kernel(ids_ref: Any, start_ref: Any, *refs: Any, num_leaves: int, tiles: CopyTiles) -> None:
    """refs: leaves [num_blocks, numbers], then staging [rows, words], twice where it is aliased."""
    staging_ref, row = refs[-1], pl.program_id(0)
    word = staging_ref.dtype
    for leaf_ref, first, numbers, is_real in _chunks(ids_ref, refs[:num_leaves], word, start_ref[0], tiles):
        exists = numbers < leaf_ref.shape[1]
        zero = jnp.zeros((), leaf_ref.dtype)
        bits = _to_bits(plt.load(leaf_ref.at[ids_ref[row], numbers], mask=exists & is_real, other=zero))
        ratio = leaf_ref.dtype.itemsize // word.itemsize
        for i in range(ratio):
            piece = bits
            if ratio > 1:
                piece = lax.shift_right_logical(bits, jnp.asarray(8 * word.itemsize * i, bits.dtype))
            where = jnp.where(exists, first + numbers * ratio + i, staging_ref.shape[1])
            plt.store(staging_ref.at[row, where], piece.astype(word), mask=exists)


def _scatter_kernel(ids_ref: Any, start_ref: Any, staging_ref: Any, *refs: Any, tiles: CopyTiles) -> None:
    """refs: leaves [num_blocks, numbers], twice, for they are aliased to the outputs."""
    row, word = pl.program_id(0), staging_ref.dtype
    for leaf_ref, first, numbers, is_real in _chunks(ids_ref, refs[len(refs) // 2 :], word, start_ref[0], tiles):
        inside = (numbers < leaf_ref.shape[1]) & is_real
        ratio = leaf_ref.dtype.itemsize // word.itemsize
        wide = _BITS.get(leaf_ref.dtype.itemsize, word)
        bits = jnp.zeros(numbers.shape, wide)
        for i in range(ratio):
            piece = plt.load(staging_ref.at[row, first + numbers * ratio + i], mask=inside, other=jnp.zeros((), word))
            bits |= piece.astype(wide) << jnp.asarray(8 * word.itemsize * i, wide) if ratio > 1 else piece
        where = jnp.where(inside, numbers, leaf_ref.shape[1])
        plt.store(leaf_ref.at[ids_ref[row], where], lax.bitcast_convert_type(bits, leaf_ref.dtype), mask=inside)


def _chunks(
    ids_ref: Any, leaf_refs: Any, word: Any, start: jax.Array, tiles: CopyTiles
) -> Iterator[tuple[Any, jax.Array, jax.Array, jax.Array]]:
    """For each leaf: its ref, its first word in staging, the numbers of the chunk, and whether there is a block."""
    block_id = ids_ref[pl.program_id(0)]
    numbers = pl.program_id(1) * tiles.tile_words + jnp.arange(tiles.tile_words)
    for leaf_ref in leaf_refs:
        num_blocks, size = leaf_ref.shape
        yield leaf_ref, start, numbers, (block_id >= 0) & (block_id < num_blocks)
        start = start + size * leaf_ref.dtype.itemsize // word.itemsize


def _to_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, {1: jnp.uint8, **_BITS}[x.dtype.itemsize])


BACKEND = CopyBackend("pallas_triton", gather, scatter, copy)
INTERPRETED = CopyBackend(
    "pallas_triton_interpret",
    partial(gather, interpret=True),
    partial(scatter, interpret=True),
    partial(copy, interpret=True),
)
