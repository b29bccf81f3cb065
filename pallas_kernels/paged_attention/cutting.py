"""Contexts cut into pieces of about equal work, decided on the device from the step's own lengths.

A row of 32k tokens alone, or among short ones, becomes many pieces; 64 rows of 4k tokens become two each.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pieces import Pieces


class Cuts(NamedTuple):
    """Pieces of all rows, in order, int32."""

    rows: jax.Array  # [pieces]
    firsts: jax.Array  # [pieces] first token
    ends: jax.Array  # [pieces] past the last token; not above the first where there is no piece
    row_starts: jax.Array  # [rows + 1] each row's first piece


def cut(firsts: jax.Array, ends: jax.Array, *, extra: int, min_piece: int, tile_kv: int) -> Cuts:
    """The tokens from `firsts` up to `ends` [rows] of each row in equal pieces of whole tiles of `tile_kv` tokens.

    About `extra` of them over all rows, fewer where they would be shorter than `min_piece` tokens, and never more than
    rows + `extra`, since each row rounds up once.
    """
    lengths = ends - firsts
    most = jnp.maximum(_ceil_div(jnp.sum(lengths), extra), min_piece)
    # Whole tiles before counting: else a row's last piece might come out empty, and nobody would write its output.
    most = _ceil_div(most, tile_kv) * tile_kv
    counts = _ceil_div(lengths, most)
    pieces = Pieces.of(counts)
    width = _ceil_div(_ceil_div(lengths, jnp.maximum(counts, 1)), tile_kv) * tile_kv
    index = jnp.arange(lengths.shape[0] + extra, dtype=jnp.int32)
    rows, within = pieces.locate(index)
    first = firsts[rows] + within * width[rows]
    end = jnp.where(index < pieces.total, jnp.minimum(first + width[rows], ends[rows]), first)
    return Cuts(rows, first, end, jnp.concatenate([jnp.zeros(1, jnp.int32), pieces.ends.astype(jnp.int32)]))


def _ceil_div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    b = jnp.broadcast_to(jnp.asarray(b, a.dtype), a.shape)
    return lax.div(a + b - 1, b)
