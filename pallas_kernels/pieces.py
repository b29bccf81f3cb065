"""Lists of equal pieces of work over rows, and which piece belongs to which row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pieces(NamedTuple):
    """A list of equal pieces of work over rows: row r owns `ends[r] - ends[r - 1]` of them."""

    ends: jax.Array  # [rows]

    @classmethod
    def of(cls, counts: jax.Array) -> "Pieces":
        return cls(jnp.cumsum(counts))

    @property
    def total(self) -> jax.Array:
        return self.ends[-1]

    def locate(self, pieces: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(row, index within the row) of each piece; past the end, the last row and an index past its own."""
        row = jnp.sum(self.ends <= pieces[..., None], axis=-1, dtype=jnp.int32)
        row = jnp.minimum(row, self.ends.shape[0] - 1)
        return row, pieces - jnp.where(row > 0, self.ends[row - 1], 0)
