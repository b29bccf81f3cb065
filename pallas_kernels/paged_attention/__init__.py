"""Paged attention for decodes: one query token a row attends to that row's cached blocks.

The op reads the cache only. `reference` defines it; `dispatch.choose` picks a backend.
"""

from pallas_kernels.paged_attention.interface import PagedBackend

__all__ = ["PagedBackend"]
