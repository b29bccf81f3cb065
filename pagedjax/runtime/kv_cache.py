"""How many blocks the KV cache has, and the cache itself: one value a layer, whose layout is the backend's own."""

import os
from pathlib import Path
from typing import Any

import jax

from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.errors import ConfigError
from pagedjax.models.config import ModelConfig
from pagedjax.runtime.config import RuntimeConfig
from pallas_kernels.ragged_attention import AttentionBackend, KVBlocks

GIB = 2**30
# What an automatic size takes of the memory that is free, and at most on a host.
_HOST_SHARE, _HOST_LIMIT_BYTES = 0.4, 4 * GIB
_DEVICE_SHARE = 0.85


def block_bytes(model: ModelConfig, backend: AttentionBackend, block_size: int, dtype: Any) -> int:
    """Bytes of one block over all layers."""
    return model.num_layers * backend.block_bytes(block_size, model.num_kv_heads, model.head_dim, dtype)


def choose_num_blocks(
    runtime: RuntimeConfig, scheduler: SchedulerConfig, bytes_per_block: int, *, spared_bytes: int = 0
) -> int:
    """The number of blocks to allocate. `scheduler.num_blocks` plays no part. An automatic size spares `spared_bytes`
    for what else the device must hold.

    --num-gpu-blocks-override is taken as it is; --kv-cache-memory, or by default a share of the memory that is free
    now, must hold one sequence of max_model_len. An automatic size never exceeds what max_num_seqs sequences of
    max_model_len can use. None may exceed what is free. Raises ConfigError with the bytes needed and there, and the
    flags to change.
    """
    if runtime.num_gpu_blocks_override is not None:
        return _checked(runtime.num_gpu_blocks_override, bytes_per_block)
    sequence_blocks = num_blocks_for(scheduler.max_model_len, scheduler.block_size)
    if runtime.kv_cache_memory is not None:
        num_bytes = runtime.kv_cache_memory * GIB
        num_blocks = int(num_bytes // bytes_per_block)
    else:
        num_bytes = max(automatic_bytes() - spared_bytes, 0)
        num_blocks = _steady(int(num_bytes // bytes_per_block), sequence_blocks)
        num_blocks = min(num_blocks, scheduler.max_num_seqs * sequence_blocks)
    if num_blocks < sequence_blocks:
        raise ConfigError(
            f"the KV cache must hold one sequence of max_model_len {scheduler.max_model_len}: "
            f"{_gib(sequence_blocks * bytes_per_block)} are needed, {_gib(num_bytes)} are available "
            f"({num_blocks * scheduler.block_size} tokens); raise --kv-cache-memory or lower --max-model-len"
        )
    return _checked(num_blocks, bytes_per_block)


def automatic_bytes() -> int:
    """A share of the memory that is free: the accelerator's, or the host's up to 4 GiB."""
    on_device = free_device_bytes()
    if on_device is not None:
        return int(on_device * _DEVICE_SHARE)
    return int(min(free_host_bytes() * _HOST_SHARE, _HOST_LIMIT_BYTES))


def free_device_bytes() -> int | None:
    """Memory that the accelerator's allocator may still give; None where there is no accelerator."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if stats and "bytes_limit" in stats else None


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take, within the limit of its container; where the system does not tell
    (macOS), all of the machine's. Raises ConfigError if that is unknown too."""
    try:
        free = _numbers(meminfo)["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        free = _host_bytes()
    try:
        # Pages of files that nobody has touched lately count as used, but are given up as soon as memory is short.
        used = int((cgroup / "memory.current").read_text()) - _numbers(cgroup / "memory.stat")["inactive_file"]
        limit = int((cgroup / "memory.max").read_text())
    except (OSError, KeyError, ValueError):  # no limit, or another version of cgroups
        return free
    return max(min(free, limit - used), 0)


def _numbers(path: Path) -> dict[str, int]:
    """The first two words of each line, the second a number."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}


def _host_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        raise ConfigError("the memory of this machine cannot be read; set --kv-cache-memory") from None


def pointers(caches: tuple[KVBlocks, ...]) -> tuple[int, ...]:
    """The addresses of the cache's buffers: equal from step to step as long as it is updated in place."""
    return tuple(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches))


def _checked(num_blocks: int, bytes_per_block: int) -> int:
    on_device, needed = free_device_bytes(), num_blocks * bytes_per_block
    free = free_host_bytes() if on_device is None else on_device
    if needed > free:
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks takes {_gib(needed)}, and {_gib(free)} of memory are free; lower "
            "--kv-cache-memory or --num-gpu-blocks-override"
        )
    return num_blocks


def _steady(num_blocks: int, least: int) -> int:
    """Rounded down to three leading bits, not below `least` if it was not: programs depend on the cache's shape, and a
    number that follows every byte of free memory would have them compiled anew at each start."""
    step = 1 << max(num_blocks.bit_length() - 3, 0)
    return max(num_blocks // step * step, min(least, num_blocks))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
