"""Ragged paged attention: packed chunks and decodes of many rows attend, causally, to their cached blocks.

The op writes the step's keys and values into the cache, then attends. `reference` defines it; `dispatch.choose`
picks a backend.
"""

from pallas_kernels.ragged_attention.interface import (
    AttentionBackend,
    AttentionNeed,
    AttentionShape,
    AttentionVariant,
    KVBlocks,
    Ragged,
)

__all__ = ["AttentionBackend", "AttentionNeed", "AttentionShape", "AttentionVariant", "KVBlocks", "Ragged"]
