"""KV blocks in the host's memory: one arena, taken whole at the start."""

import mmap

import numpy as np

from pagedjax.core.errors import ConfigError
from pagedjax.runtime.kv_cache import GIB, free_host_bytes


class HostPool:
    """Blocks of `block_bytes` bytes. Threads may use it at once, for different blocks.

    Raises ConfigError if that much memory is not free. Every page is touched at once: what is reserved but not there
    would be found out by the process being killed.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._blocks = _reserve(num_blocks * block_bytes).reshape(num_blocks, block_bytes)

    def write(self, block_id: int, block: np.ndarray) -> None:
        """Keep a block [block_bytes] uint8."""
        self._blocks[block_id] = block

    def read(self, block_id: int, out: np.ndarray) -> None:
        """Fill `out` [block_bytes] uint8 with a block."""
        out[:] = self._blocks[block_id]


def _reserve(num_bytes: int) -> np.ndarray:
    free = free_host_bytes()
    if num_bytes > free:
        raise ConfigError(
            f"a swap space of {_gib(num_bytes)} takes more than the {_gib(free)} that are free; lower --swap-space"
        )
    try:
        arena = mmap.mmap(-1, num_bytes)
    except (OSError, ValueError, OverflowError) as error:  # a limit of the process (ulimit -v)
        raise ConfigError(
            f"a swap space of {_gib(num_bytes)} cannot be reserved: {error}; lower --swap-space"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        arena.madvise(mmap.MADV_HUGEPAGE)
    blocks = np.frombuffer(arena, np.uint8)
    blocks[:] = 0
    return blocks


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
