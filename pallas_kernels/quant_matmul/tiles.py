"""How much one program of a kernel takes. Tiles are data: reasoned, not measured on a GPU yet."""

from typing import NamedTuple

# About two programs for each of an H200's 132 multiprocessors.
WANTED_PROGRAMS = 264


class QuantTiles(NamedTuple):
    """`tile_m` tokens by `tile_n` outputs, `tile_k` inputs an iteration; Triton's warps and pipeline stages.

    The iterations are shared out evenly among `splits` programs, whose sums are added afterwards.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    splits: int
    num_warps: int
    num_stages: int


def quant_tiles(num_tokens: int, num_in: int, num_out: int, group_size: int) -> QuantTiles:
    """Few tokens share out the inputs, so that reading the weights keeps the whole chip busy."""
    tile_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    tile_n = 64 if tile_m <= 32 else 128
    tile_k = next(k for k in (128, 64, 32) if group_size % k == 0)
    programs = -(-num_tokens // tile_m) * -(-num_out // tile_n)
    # Each split adds a result to write and to sum: none is worth fewer than four iterations. All take as many.
    num_steps, most = num_in // tile_k, max(1, min(-(-WANTED_PROGRAMS // programs), num_in // tile_k // 4, 16))
    splits = next(n for n in range(most, 0, -1) if num_steps % n == 0)
    return QuantTiles(tile_m, tile_n, tile_k, splits, num_warps=4 if tile_m <= 32 else 8, num_stages=3)
