"""How a backend cuts a decode batch. Tiles are data: found by measuring."""

from typing import NamedTuple

from pallas_kernels.attention import AttentionShape
from pallas_kernels.triton import power_of_two


class DecodeTiles(NamedTuple):
    """`size` packed query vectors by `tile_kv` cached tokens; Triton's warps and pipeline stages. A context is split
    into pieces of at least `min_piece` tokens, about `num_programs` of them over all rows and KV heads; `tile_pieces`
    of them are combined at a time."""

    size: int
    tile_kv: int
    num_warps: int
    num_stages: int
    min_piece: int = 256
    num_programs: int = 396
    tile_pieces: int = 16


def decode_tiles(shape: AttentionShape, itemsize: int) -> DecodeTiles:
    """For vectors of `itemsize` bytes a number. Three programs a multiprocessor of an H200 (132) fit, and hide
    each other's latency. 64 tokens of head_dim 128 in bfloat16 are 32 KB of K and V; as addresses come from the table,
    Triton keeps (num_stages - 1) / 2 such tiles under way. Reasoned from what compiles, not measured on a GPU."""
    size = max(16, power_of_two(shape.num_heads // shape.num_kv_heads))
    wide = power_of_two(shape.head_dim) > 128
    if itemsize == 4:  # three products each, whose parts take many registers
        return DecodeTiles(size, tile_kv=16 if wide else 32, num_warps=8, num_stages=3)
    return DecodeTiles(size, tile_kv=32 if wide else 64, num_warps=4, num_stages=5)
