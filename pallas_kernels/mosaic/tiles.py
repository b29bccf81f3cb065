"""Tiles of the Mosaic GPU kernels. Reasoned from shared memory and registers, not measured on a GPU."""

from typing import NamedTuple

# Rows of one wgmma: a warpgroup's query tile.
ROWS = 64
SHARED_BYTES = 232_448  # a block's limit on Hopper


class Registers(NamedTuple):
    """Registers a thread, by role. A multiprocessor has 512 for the threads of its warpgroups."""

    consumer: int
    producer: int


def registers(num_consumers: int) -> Registers:
    return Registers(240, 160) if num_consumers == 1 else Registers(232, 40)


class DecodeTiles(NamedTuple):
    """`tile_kv` cached tokens a slot, `slots` of K and as many of V. A context is split into pieces of at least
    `min_piece` tokens, about `num_programs` of them over all rows and KV heads: two a multiprocessor."""

    tile_kv: int
    slots: int
    min_piece: int = 512
    num_programs: int = 264


class PrefillTiles(NamedTuple):
    """`consumers` warpgroups of 64 query tokens each by `tile_kv` cached tokens a slot; `num_programs` resident
    programs, one a multiprocessor."""

    consumers: int
    tile_kv: int
    slots: int
    num_programs: int = 132


def decode_tiles(head_dim: int) -> DecodeTiles:
    """At most 160 KiB in flight a multiprocessor: 4.8 TB/s times 1 us of latency over 132 of them is 36 KiB."""
    if head_dim <= 96:
        return DecodeTiles(tile_kv=128, slots=4 if head_dim == 64 else 3)
    return DecodeTiles(tile_kv=64, slots=5 if head_dim == 128 else 2)


def prefill_tiles(head_dim: int) -> PrefillTiles:
    if head_dim == 256:
        return PrefillTiles(consumers=1, tile_kv=64, slots=2)
    return PrefillTiles(consumers=2, tile_kv=128, slots=4 if head_dim == 64 else 2)
