"""Ragged attention as Mosaic GPU kernels for Hopper: TMA, wgmma, producer and consumer warpgroups.

XLA writes the step's keys and values; decode rows go to the kernel of `paged_attention`, the others to that of
`mosaic_kernel.py`; their outputs are joined in place.

Algorithm: FlashAttention-3 (arXiv:2407.08608) over block tables. The packed batch is cut into tiles of 64 tokens a
consumer; a piece of work is (tile, row in it, head). Programs are resident, one a multiprocessor, and take pieces in
turn. For each the producer warpgroup gathers the row's blocks by TMA into rings of K and V slots; each consumer
warpgroup holds 64 query tokens and walks the ring up to its own last position, tiles below every query without a mask.
A tile that one row fills is stored by TMA at once, a shared one token by token.

Bytes: K and V of a row's context once per piece (the heads of a group meet in L2), q and out once.
Limits: head_dim a multiple of 64, since TMA stores single tokens from 128-byte lines only; see `support.refuse_shape`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_blocks import KVBlocks, block_bytes, init_blocks
from pallas_kernels.kv_write import xla as kv_write
from pallas_kernels.mosaic import support
from pallas_kernels.mosaic import warpgroups as wgs
from pallas_kernels.mosaic.support import plgpu
from pallas_kernels.mosaic.tiles import ROWS, PrefillTiles, prefill_tiles
from pallas_kernels.mosaic.warpgroups import Scores
from pallas_kernels.paged_attention import pallas_mosaic as paged_attention
from pallas_kernels.pieces import Pieces
from pallas_kernels.ragged_attention.interface import AttentionBackend, AttentionNeed, Ragged
from pallas_kernels.ragged_attention.mosaic_kernel import Piece, kernel, scratch


def refuse(need: AttentionNeed) -> str | None:
    """Why the compiled kernels can't run there, or None."""
    return support.refuse_device(need.platform, need.capability) or refuse_interpreted(need)


def refuse_interpreted(need: AttentionNeed) -> str | None:
    """Why the kernels can't take these shapes anywhere, or None."""
    if need.shape.head_dim % 64:
        return f"head_dim {need.shape.head_dim} is not a multiple of 64: TMA could not store single tokens"
    return support.api_gap() or support.refuse_shape(need)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVBlocks,
    ragged: Ragged,
    *,
    scale: float,
    layer: int | jax.Array = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    max_q_len: int | None = None,
    tiles: PrefillTiles | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, KVBlocks]:
    """See `AttentionBackend`. `dispatch.choose` asks `refuse` first; here JAX itself complains."""
    cache = kv_write.write(k, v, cache, ragged.slots, layer=layer)
    num_decodes = min(q.shape[0], ragged.kv_lens.shape[0])
    is_decode = jnp.arange(num_decodes) < ragged.num_decode_rows
    rows = (ragged.block_tables, jnp.where(is_decode, ragged.kv_lens[:num_decodes], 0))
    scoring = {"scale": scale, "layer": layer, "window": window, "softcap": softcap, "sinks": sinks}
    decoded = paged_attention.attend(q[:num_decodes], cache, *rows, interpret=interpret, **scoring)
    if max_q_len == 1:
        return jnp.pad(decoded, ((0, q.shape[0] - num_decodes), (0, 0), (0, 0))), cache
    out = prefill(q, cache, ragged, tiles=tiles, interpret=interpret, **scoring)
    # Decode rows are written over it; others' index lies past the end, and is dropped. (XLA 0.11 fails to compile a
    # dynamic-update-slice of a custom call's result.)
    places = jnp.where(is_decode, jnp.arange(num_decodes), q.shape[0])
    return out.at[places].set(decoded, mode="drop", unique_indices=True), cache


def attend_interpreted(*args: Any, **options: Any) -> tuple[jax.Array, KVBlocks]:
    """`attend` run by the Mosaic GPU interpreter with race detection, by few programs: slow, for tests."""
    tiles = prefill_tiles(args[0].shape[2])._replace(num_programs=2)
    return attend(*args, **options, tiles=tiles, interpret=support.interpreter())


# Jitted, so that the layers of a model share one lowering of the kernel, which takes a second.
@partial(jax.jit, static_argnames=("scale", "window", "softcap", "tiles", "interpret"))
def prefill(
    q: jax.Array,
    cache: KVBlocks,
    ragged: Ragged,
    *,
    scale: float,
    layer: int | jax.Array = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    tiles: PrefillTiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Causal attention of the rows past the decode rows, like q [tokens, heads, head_dim].

    `cache` holds the step's tokens already. Padding tokens give 0; what the tokens of decode rows give means nothing.
    """
    num_tokens, heads, head_dim = q.shape
    tiles = tiles or prefill_tiles(head_dim)
    tile_q = tiles.consumers * ROWS
    q = jnp.pad(q, ((0, -num_tokens % tile_q), (0, 0), (0, 0)))
    count, pieces = pieces_of(ragged, q.shape[0], tile_q)
    out = plgpu.kernel(
        partial(kernel, scores=Scores(scale, softcap), window=window, tiles=tiles, interpret=interpret),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(tiles.num_programs,),
        grid_names=("program",),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch(cache.k, tiles, interpret),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="ragged_attention_mosaic",
    )(
        q,
        cache.k,
        cache.v,
        ragged.block_tables,
        jnp.stack(pieces),
        count.reshape(1),
        jnp.full((heads,), wgs.MASKED, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        jnp.asarray(layer, jnp.int32).reshape(1),
    )
    return out[:num_tokens]


def pieces_of(ragged: Ragged, padded_tokens: int, tile_q: int) -> tuple[jax.Array, Piece]:
    """How many pieces there are, and the list of them, each field [bound]. Padding tokens come last, as a row."""
    num_rows = ragged.kv_lens.shape[0]
    is_prefill = jnp.arange(num_rows) >= ragged.num_decode_rows
    ends = jnp.append(ragged.q_starts[1:], padded_tokens).astype(jnp.int32)
    starts = jnp.where(jnp.append(is_prefill, True), ragged.q_starts, ends)
    kv_lens = jnp.append(ragged.kv_lens, 0)
    counts = jnp.where(ends > starts, (ends - 1) // tile_q - starts // tile_q + 1, 0)
    # Each row's first piece may share its tile with the row before it.
    bound = padded_tokens // tile_q + num_rows
    row, index = Pieces.of(counts).locate(jnp.arange(bound, dtype=jnp.int32))
    base = (starts[row] // tile_q + index) * tile_q
    piece = Piece(
        row=jnp.minimum(row, num_rows - 1),
        base=base,
        begin=jnp.maximum(starts[row] - base, 0),
        end=jnp.minimum(ends[row] - base, tile_q),
        position=base - ends[row] + kv_lens[row],
        kv_len=kv_lens[row],
    )
    return jnp.sum(counts), Piece(*(x.astype(jnp.int32) for x in piece))


_KIND = partial(AttentionBackend, init_cache=init_blocks, block_bytes=block_bytes, prefers_decode_programs=True)
BACKEND = _KIND("pallas_mosaic", attend=attend)
INTERPRETED = _KIND("pallas_mosaic_interpret", attend=attend_interpreted)
