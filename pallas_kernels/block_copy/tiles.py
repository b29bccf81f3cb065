"""How much one program of a backend moves. Tiles are data: found by measuring."""

from typing import NamedTuple


class CopyTiles(NamedTuple):
    """`tile_words` numbers of each of `max_leaves` leaves at most."""

    tile_words: int
    max_leaves: int


def copy_tiles() -> CopyTiles:
    """Each of 128 threads moves 8 numbers of every leaf, 16 bytes in half precision. With more leaves, a kernel takes
    long to compile. Reasoned, not measured on a GPU."""
    return CopyTiles(tile_words=1024, max_leaves=16)
