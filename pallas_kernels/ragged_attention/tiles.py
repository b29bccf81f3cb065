"""How much one iteration of a backend takes, by the size of the step. Tiles are data: found by measuring."""

from typing import NamedTuple

from pallas_kernels.attention import AttentionShape
from pallas_kernels.triton import power_of_two


class XlaTiles(NamedTuple):
    """`decode_items` pieces of `decode_kv` cached tokens a decode iteration; `prefill_q` query tokens by
    `prefill_kv` cached tokens a prefill iteration; `packed_heads` KV heads in one dot (see xla.py)."""

    decode_items: int
    decode_kv: int
    prefill_q: int
    prefill_kv: int
    packed_heads: int = 4


class PrefillTiles(NamedTuple):
    """`tile_q` query tokens, whose heads of a KV group make `size` packed vectors (the rest is padding), by `tile_kv`
    cached tokens; Triton's warps and pipeline stages."""

    tile_q: int
    size: int
    tile_kv: int
    num_warps: int
    num_stages: int


def xla_tiles(num_tokens: int) -> XlaTiles:
    """Tiles for a step of `num_tokens` packed tokens (padding included)."""
    if num_tokens <= 4:
        return XlaTiles(decode_items=4, decode_kv=64, prefill_q=num_tokens, prefill_kv=128)
    return XlaTiles(decode_items=16, decode_kv=64, prefill_q=min(32, num_tokens), prefill_kv=128)


def prefill_tiles(shape: AttentionShape, itemsize: int, is_quantised: bool = False) -> PrefillTiles:
    """For vectors of `itemsize` bytes a number. The largest that compile without spills for an A100 and an H200 (which
    alone could take 64 cached tokens of head_dim 128), not measured on either. They take less than 100 KB of shared
    memory, where an A100's block has 163."""
    group, columns = shape.num_heads // shape.num_kv_heads, power_of_two(shape.head_dim)
    num_warps, num_stages = 8, 3
    if itemsize == 4:  # three products each, whose parts take many registers
        size, tile_kv, num_stages = (32, 32, 2) if columns <= 128 else (16, 16, 2)
    elif columns <= 64:
        size, tile_kv = 128, 64
    else:  # a quantised cache is converted in registers
        size, tile_kv = 64 if columns > 128 or is_quantised else 128, 32
    size = max(size, power_of_two(group))
    return PrefillTiles(size // group, size, tile_kv, num_warps, num_stages)
