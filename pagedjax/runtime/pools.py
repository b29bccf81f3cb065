"""The lower tiers that a configuration asks for."""

from pathlib import Path

import jax

from pagedjax.core.errors import ConfigError
from pagedjax.core.plan import Tier
from pagedjax.runtime.config import RuntimeConfig
from pagedjax.runtime.disk import DiskPool, SwapFile
from pagedjax.runtime.host import HostPool
from pagedjax.runtime.kv_cache import GIB
from pagedjax.runtime.pinned import MEMORY, PinnedPool
from pagedjax.runtime.swap import AnyPool


def make_pools(runtime: RuntimeConfig, block_bytes: int) -> dict[Tier, AnyPool]:
    """A pool for each lower tier that has space. Raises ConfigError, naming the flag, for space that is not there or
    holds no block."""
    pools: dict[Tier, AnyPool] = {}
    if runtime.swap_space:
        pools[Tier.HOST] = _host_pool(_num_blocks("swap-space", runtime.swap_space, block_bytes), block_bytes)
    if runtime.swap_space_disk:
        if runtime.swap_dir is None:
            raise ConfigError("the configuration is not resolved: swap_dir is not known")
        num_blocks = _num_blocks("swap-space-disk", runtime.swap_space_disk, block_bytes)
        file = SwapFile(_made(runtime.swap_dir), num_blocks * block_bytes)
        pools[Tier.DISK] = DiskPool(file, num_blocks, block_bytes)
    return pools


def _host_pool(num_blocks: int, block_bytes: int) -> AnyPool:
    """Pinned memory for an accelerator that reaches it; on a CPU, where the cache lies in the same memory, an arena."""
    device = jax.devices()[0]
    if device.platform != "cpu" and MEMORY in {memory.kind for memory in device.addressable_memories()}:
        return PinnedPool(num_blocks, block_bytes, device)
    return HostPool(num_blocks, block_bytes)


def _num_blocks(flag: str, gib: float, block_bytes: int) -> int:
    num_blocks = int(gib * GIB // block_bytes)
    if not num_blocks:
        raise ConfigError(f"{gib:g} GiB hold no block of {block_bytes} bytes; raise --{flag}")
    return num_blocks


def _made(directory: str) -> Path:
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a ValueError: no path can be that
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot make the folder {directory!r}: {reason}; set --swap-dir") from error
    return folder
