"""How much one program of a backend writes. Tiles are data: found by measuring."""

from typing import NamedTuple


class WriteTiles(NamedTuple):
    """`tile_t` tokens of one KV head; Triton's warps."""

    tile_t: int
    num_warps: int


def write_tiles(num_tokens: int) -> WriteTiles:
    """Few tokens are spread over many programs. Reasoned, not measured on a GPU."""
    return WriteTiles(tile_t=4, num_warps=1) if num_tokens <= 256 else WriteTiles(tile_t=16, num_warps=4)
