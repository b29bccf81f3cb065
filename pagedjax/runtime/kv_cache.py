"""How many blocks the KV cache has, and the cache itself: one value a layer, whose layout is the backend's own."""

import os
from pathlib import Path
from typing import Any

import jax

from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.errors import ConfigError
from pagedjax.models.config import ModelConfig
from pagedjax.runtime.config import RuntimeConfig
from pagedjax.runtime.device_memory import DeviceMemory
from pallas_kernels.ragged_attention import AttentionBackend, KVBlocks

GIB = 2**30
# What an automatic size takes of a host's memory that is free, and at most.
_HOST_SHARE, _HOST_LIMIT_BYTES = 0.4, 4 * GIB
# What it takes of an accelerator's: the allocator's pieces do not fit together without gaps.
_DEVICE_SHARE = 0.98
# Leading bits that are kept of an automatic number of blocks. A host's free memory differs from start to start.
_HOST_BITS, _DEVICE_BITS = 3, 7


def block_bytes(model: ModelConfig, backend: AttentionBackend, block_size: int, dtype: Any) -> int:
    """Bytes of one block over all layers."""
    return model.num_layers * backend.block_bytes(block_size, model.num_kv_heads, model.head_dim, dtype)


def choose_num_blocks(
    runtime: RuntimeConfig,
    scheduler: SchedulerConfig,
    bytes_per_block: int,
    *,
    spared_bytes: int = 0,
    device: DeviceMemory | None = None,
) -> int:
    """The number of blocks to allocate, on an accelerator with the memory of `device` or, without one, on the host.
    `scheduler.num_blocks` plays no part. An automatic size spares `spared_bytes` for copies under way.

    --num-gpu-blocks-override is taken as it is; --kv-cache-memory, or by default a share of the memory that is free
    now, must hold one sequence of max_model_len. An automatic size never exceeds what max_num_seqs sequences of
    max_model_len can use. None may exceed what is free. Raises ConfigError with the bytes needed and there, and the
    flags to change.
    """
    if runtime.num_gpu_blocks_override is not None:
        return _checked(runtime.num_gpu_blocks_override, bytes_per_block, device)
    sequence_blocks = num_blocks_for(scheduler.max_model_len, scheduler.block_size)
    if runtime.kv_cache_memory is not None:
        num_bytes = runtime.kv_cache_memory * GIB
        num_blocks = int(num_bytes // bytes_per_block)
    else:
        num_bytes = max(automatic_bytes(device) - spared_bytes, 0)
        bits = _HOST_BITS if device is None else _DEVICE_BITS
        num_blocks = _steady(int(num_bytes // bytes_per_block), sequence_blocks, bits)
        num_blocks = min(num_blocks, scheduler.max_num_seqs * sequence_blocks)
    if num_blocks < sequence_blocks:
        raise ConfigError(
            f"the KV cache must hold one sequence of max_model_len {scheduler.max_model_len}: "
            f"{_gib(sequence_blocks * bytes_per_block)} are needed, {_gib(num_bytes)} are available "
            f"({num_blocks * scheduler.block_size} tokens{_account(device)}); {_remedy(runtime, device)}"
        )
    return _checked(num_blocks, bytes_per_block, device)


def automatic_bytes(device: DeviceMemory | None) -> int:
    """A share of the memory that is free: the accelerator's, or the host's up to 4 GiB."""
    if device is not None:
        return int(device.free * _DEVICE_SHARE)
    return int(min(free_host_bytes() * _HOST_SHARE, _HOST_LIMIT_BYTES))


def _account(device: DeviceMemory | None) -> str:
    if device is None:
        return ""
    return f"; of {_gib(device.limit)} the model takes {_gib(device.used)} and activations {_gib(device.activations)}"


def _remedy(runtime: RuntimeConfig, device: DeviceMemory | None) -> str:
    if device is None or runtime.kv_cache_memory is not None:
        return "raise --kv-cache-memory or lower --max-model-len"
    return "raise --gpu-memory-utilization, or lower --max-model-len, --max-num-batched-tokens or --max-num-seqs"


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


def _checked(num_blocks: int, bytes_per_block: int, device: DeviceMemory | None) -> int:
    needed = num_blocks * bytes_per_block
    free = free_host_bytes() if device is None else device.free
    if needed > free:
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks takes {_gib(needed)}, and {_gib(free)} of memory are free"
            f"{_account(device)}; lower --kv-cache-memory or --num-gpu-blocks-override"
        )
    return num_blocks


def _steady(num_blocks: int, least: int, num_bits: int) -> int:
    """Rounded down to so many leading bits, not below `least` if it was not: programs depend on the cache's shape, and
    a number that follows every byte of free memory would have them compiled anew at each start."""
    step = 1 << max(num_blocks.bit_length() - num_bits, 0)
    return max(num_blocks // step * step, min(least, num_blocks))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
