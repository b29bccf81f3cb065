"""The runtime's configuration, and the finite set of shapes that may reach the device."""

import math
from dataclasses import dataclass
from itertools import pairwise

from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.errors import ConfigError

MAX_STEP_PROGRAMS = 16
# Products of 2 to 8 rows take XLA:CPU about the same time, one row half of it (float32). Sizes between powers of two
# save a step of 130 tokens from costing as much as one of 256; below 48 tokens a step is bound by the weights anyway.
_SMALL_SIZES = (1, 8)
_LEAST_BETWEEN = 48
_MIN_LARGEST_ROWS = 16  # prompt log-probabilities run the head on this many rows at least


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What the runtime adds to SchedulerConfig. `kv_cache_memory`, `swap_space` and `swap_space_disk` are in GiB; None
    means automatic. `swap_dir` holds the disk's part. `memory_share` is the part that is used of what an accelerator's
    allocator may give."""

    kv_cache_memory: float | None = None
    num_gpu_blocks_override: int | None = None
    swap_space: float = 0.0
    swap_space_disk: float = 0.0
    swap_dir: str | None = None
    compilation_cache_dir: str | None = None
    num_compile_threads: int = 2
    memory_share: float = 1.0
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        if self.kv_cache_memory is not None and not 0 < self.kv_cache_memory < math.inf:
            raise ConfigError(f"kv_cache_memory must be above 0 GiB, not {self.kv_cache_memory}; set --kv-cache-memory")
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 1:
            raise ConfigError(
                f"num_gpu_blocks_override must be at least 1, not {self.num_gpu_blocks_override}; "
                "set --num-gpu-blocks-override"
            )
        if self.kv_cache_memory is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError(
                "kv_cache_memory and num_gpu_blocks_override both say how large the KV cache is; "
                "drop --kv-cache-memory or --num-gpu-blocks-override"
            )
        for name in ("swap_space", "swap_space_disk"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be 0 GiB or more, not {getattr(self, name)}; set --{name.replace('_', '-')}"
                )
        if self.swap_dir is not None and not self.swap_space_disk:
            raise ConfigError("swap_dir is of no use without space on the disk; set --swap-space-disk")
        if self.num_compile_threads < 1:
            raise ConfigError(f"num_compile_threads must be at least 1, not {self.num_compile_threads}")

    @property
    def compiler_options(self) -> dict[str, str]:
        """XLA's, for every program. On GPUs it puts a step's kernels into command buffers (CUDA graphs), which are
        launched whole; eager programs launch each kernel, so that tools see them one by one."""
        return {"xla_gpu_enable_command_buffer": ""} if self.enforce_eager else {}


@dataclass(frozen=True, slots=True)
class Shapes:
    """Every shape the device may see. A step uses the smallest of `token_sizes` that holds its tokens; its head and
    sampler use the smallest of `row_sizes` that holds its sampling rows."""

    token_sizes: tuple[int, ...]
    row_sizes: tuple[int, ...]
    max_rows: int
    table_width: int

    @property
    def num_picked(self) -> int:
        """Rows of hidden state that a step hands to the head, the same for every size."""
        return self.row_sizes[-1]

    @property
    def score_size(self) -> int:
        """Rows per run of the head when prompt tokens are scored; bounds the logits held at once."""
        return max(size for size in self.row_sizes if size <= 32)

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """The sizes of steps whose rows have one token each."""
        most = size_for(min(self.max_rows, self.token_sizes[-1]), self.token_sizes)
        return tuple(size for size in self.token_sizes if size <= most)

    def num_rows(self, num_tokens: int) -> int:
        """Rows of the step program for `num_tokens` (one of `token_sizes`)."""
        return min(num_tokens, self.max_rows)


def shapes_for(config: SchedulerConfig) -> Shapes:
    """Powers of two up to the limits, the limits included, and for tokens sizes halfway between as long as there are
    no more than 16. Raises ConfigError past 16 step programs."""
    token_sizes = _with_sizes_between(_sizes(config.max_num_batched_tokens))
    if len(token_sizes) > MAX_STEP_PROGRAMS:
        raise ConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} needs {len(token_sizes)} step programs, at most "
            f"{MAX_STEP_PROGRAMS} are allowed; lower --max-num-batched-tokens"
        )
    return Shapes(
        token_sizes=token_sizes,
        row_sizes=_sizes(max(config.max_num_seqs, _MIN_LARGEST_ROWS)),
        max_rows=config.max_num_seqs,
        table_width=num_blocks_for(config.max_model_len, config.block_size),
    )


def size_for(count: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest size that holds `count`, or None."""
    return next((size for size in sizes if size >= count), None)


def _sizes(largest: int) -> tuple[int, ...]:
    powers = [*_SMALL_SIZES, *(1 << bit for bit in range(4, largest.bit_length()))]
    return (*(size for size in powers if size < largest), largest)


def _with_sizes_between(sizes: tuple[int, ...]) -> tuple[int, ...]:
    between = [
        (low + high) // 2 for low, high in pairwise(sizes) if high == 2 * low and low + high >= 2 * _LEAST_BETWEEN
    ]
    room = max(MAX_STEP_PROGRAMS - len(sizes), 0)
    return tuple(sorted({*sizes, *between[::-1][:room]}))
