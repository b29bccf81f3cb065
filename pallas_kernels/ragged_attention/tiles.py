"""How much one iteration of a backend takes, by the size of the step. Tiles are data: found by measuring."""

from typing import NamedTuple

from pallas_kernels.ragged_attention.interface import AttentionShape


class XlaTiles(NamedTuple):
    """`decode_items` pieces of `decode_kv` cached tokens a decode iteration; `prefill_q` query tokens by
    `prefill_kv` cached tokens a prefill iteration; `packed_heads` KV heads in one dot (see xla.py)."""

    decode_items: int
    decode_kv: int
    prefill_q: int
    prefill_kv: int
    packed_heads: int = 4


class TritonTiles(NamedTuple):
    """`tile_q` query tokens by `tile_kv` cached tokens; `group` and `head_dim` padded to powers of two; Triton's
    warps and pipeline stages."""

    tile_q: int
    tile_kv: int
    group: int
    head_dim: int
    num_warps: int
    num_stages: int


def xla_tiles(num_tokens: int) -> XlaTiles:
    """Tiles for a step of `num_tokens` packed tokens (padding included)."""
    if num_tokens <= 4:
        return XlaTiles(decode_items=4, decode_kv=64, prefill_q=num_tokens, prefill_kv=128)
    return XlaTiles(decode_items=16, decode_kv=64, prefill_q=min(32, num_tokens), prefill_kv=128)


def triton_tiles(shape: AttentionShape) -> TritonTiles:
    """Tiles of 64 packed query rows, or the group where it is larger. Reasoned (registers), not measured on a GPU."""
    group = _power_of_two(shape.num_heads // shape.num_kv_heads)
    head_dim = max(16, _power_of_two(shape.head_dim))
    return TritonTiles(max(1, 64 // group), 64, group, head_dim, num_warps=4 if head_dim <= 64 else 8, num_stages=2)


def _power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << (n - 1).bit_length()
