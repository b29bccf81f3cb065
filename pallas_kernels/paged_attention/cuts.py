"""How rows' contexts are cut into pieces of work, on the device, by the step's lengths (Flash-Decoding)."""

from typing import NamedTuple, Protocol

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


class Split(Protocol):
    """How finely: pieces of whole tiles of `tile_kv` tokens and of at least `min_piece`, about `num_programs` of them
    over all rows and KV heads."""

    @property
    def tile_kv(self) -> int: ...
    @property
    def min_piece(self) -> int: ...
    @property
    def num_programs(self) -> int: ...


def cut(spans: tuple[jax.Array, jax.Array], num_kv_heads: int, split: Split) -> Cuts:
    """Equal pieces a row, of whole tiles, and not more than rows + `extra` of them: each row rounds up once.

    `spans` are each row's first token and the one past its last, [rows] int32."""
    firsts, ends = spans
    lengths = ends - firsts
    extra = max(1, split.num_programs // num_kv_heads)
    most = jnp.maximum(_ceil_div(jnp.sum(lengths), extra), split.min_piece)
    # Whole tiles before counting: else a row's last piece might come out empty, and nobody would write its output.
    most = _ceil_div(most, split.tile_kv) * split.tile_kv
    counts = _ceil_div(lengths, most)
    pieces = Pieces.of(counts)
    width = _ceil_div(_ceil_div(lengths, jnp.maximum(counts, 1)), split.tile_kv) * split.tile_kv
    index = jnp.arange(lengths.shape[0] + extra, dtype=jnp.int32)
    rows, within = pieces.locate(index)
    first = firsts[rows] + within * width[rows]
    end = jnp.where(index < pieces.total, jnp.minimum(first + width[rows], ends[rows]), first)
    return Cuts(rows, first, end, jnp.concatenate([jnp.zeros(1, jnp.int32), pieces.ends.astype(jnp.int32)]))


def _ceil_div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    b = jnp.broadcast_to(jnp.asarray(b, a.dtype), a.shape)
    return lax.div(a + b - 1, b)
