"""How much one iteration of a backend takes, by the size of the step. Tiles are data: found by measuring."""

from typing import NamedTuple


class XlaTiles(NamedTuple):
    """`decode_items` pieces of `decode_kv` cached tokens a decode iteration; `prefill_q` query tokens by
    `prefill_kv` cached tokens a prefill iteration; `packed_heads` KV heads in one dot (see xla.py)."""

    decode_items: int
    decode_kv: int
    prefill_q: int
    prefill_kv: int
    packed_heads: int = 4


class TritonTiles(NamedTuple):
    """`tile_q` query tokens a program, by blocks of the cache; Triton's warps and pipeline stages."""

    tile_q: int
    num_warps: int
    num_stages: int


def xla_tiles(num_tokens: int) -> XlaTiles:
    """Tiles for a step of `num_tokens` packed tokens (padding included)."""
    if num_tokens <= 4:
        return XlaTiles(decode_items=4, decode_kv=64, prefill_q=num_tokens, prefill_kv=128)
    return XlaTiles(decode_items=16, decode_kv=64, prefill_q=min(32, num_tokens), prefill_kv=128)


def triton_tiles(num_tokens: int, head_dim: int) -> TritonTiles:
    """Tiles for a step of `num_tokens` packed tokens. Set by reasoning (registers), not yet measured on a GPU."""
    return TritonTiles(tile_q=min(16, num_tokens), num_warps=4 if head_dim <= 64 else 8, num_stages=2)
