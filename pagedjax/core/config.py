"""The scheduler's configuration: plain numbers, checked once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pagedjax.core.errors import ConfigError

PreemptionMethod = Literal["auto", "swap", "recompute"]
PreemptionMode = Literal["aggressive", "conservative"]
PreemptionStrategy = Literal["priority", "tenant_aware"]
MAX_WEIGHT = 10_000
MAX_WAIT_S = 1e9
MAX_CREDIT = 10_000

_COUNTS = ("block_size", "num_blocks", "max_num_seqs", "max_model_len", "max_queued_requests", "max_queued_tokens")
FIXED = ("block_size", "num_blocks", "num_host_blocks", "num_disk_blocks")
_COUNTS_OR_ZERO = (
    "num_host_blocks",
    "num_disk_blocks",
    "swap_us_per_block",
    "recompute_us_per_token",
    "time_slice",
    "min_execution_chunk",
)
_CHOICES = {
    "preemption_method": get_args(PreemptionMethod),
    "preemption_mode": get_args(PreemptionMode),
    "preemption_strategy": get_args(PreemptionStrategy),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the pure scheduler. Lengths are in tokens.

    `async_scheduling` plans one step ahead of the one that runs. A tier of 0 blocks is absent. `preemption_method` auto
    swaps where moving a victim's blocks in again, `swap_us_per_block` each, takes less time than computing its tokens
    again, `recompute_us_per_token` each; both are measured. (The way out hides behind the beneficiary's work.)

    Without `enable_preemption` a request is admitted once there is room for all its tokens. `preemption_mode`
    aggressive admits on the prompt and one block, and preempts for a better-ranked request at once; conservative admits
    on the expected length, and preempts only for one that has waited a `time_slice`, is aged or whose tenant is owed.
    `time_slice` (ms) and `min_execution_chunk` (tokens) are what a sequence may run before it must yield to a better
    rank. After `max_wait_s` in line a request goes before all that have waited less. `preemption_strategy` tenant_aware
    protects a tenant whose share is more than `fairness_threshold` below the fair one, and preempts those first that
    hold as much more than their fair share of the blocks. `tenant_weights`, given as pairs or as a mapping, are (name,
    weight); a tenant that is not named has the weight 1. Raises ConfigError, naming the flag.
    """

    block_size: int = 16
    num_blocks: int = 1024
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_model_len: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    max_queued_requests: int = 4096
    max_queued_tokens: int = 8_000_000
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    preemption_method: PreemptionMethod = "auto"
    swap_us_per_block: int = 50
    recompute_us_per_token: int = 100
    enable_preemption: bool = True
    preemption_mode: PreemptionMode = "aggressive"
    preemption_strategy: PreemptionStrategy = "tenant_aware"
    time_slice: int = 50
    min_execution_chunk: int = 16
    max_wait_s: float = 60.0
    fairness_threshold: float = 0.2
    tenant_weights: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tenant_weights", weight_pairs(self.tenant_weights))
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}; {_flag(name)}")
        for name in _COUNTS_OR_ZERO:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, it is {getattr(self, name)}; {_flag(name)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} {getattr(self, name)!r} is not one of {', '.join(choices)}; {_flag(name)}")
        if not 0 < self.max_wait_s <= MAX_WAIT_S:
            raise ConfigError(f"max_wait_s must lie above 0 and up to 10^9, not {self.max_wait_s}; set --max-wait-s")
        if not 0 <= self.fairness_threshold <= 1:
            raise ConfigError(
                f"fairness_threshold must lie in 0..1, not {self.fairness_threshold}; set --fairness-threshold 0.2"
            )
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size {self.block_size} must be a power of two; try --block-size 16")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs "
                f"{self.max_num_seqs}, so that every running sequence can decode in one step; "
                "raise --max-num-batched-tokens"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens {self.max_num_batched_tokens} must reach "
                f"max_model_len {self.max_model_len}; raise --max-num-batched-tokens "
                "or drop --no-enable-chunked-prefill"
            )

    @property
    def time_slice_us(self) -> int:
        return self.time_slice * 1000

    @property
    def max_wait_us(self) -> int:
        return round(self.max_wait_s * 1e6)

    def queue_share(self, tenant: str) -> tuple[int, int]:
        """How many requests and tokens the tenant may have in line: its weight's share of the queue, if there are
        weights."""
        weights = dict(self.tenant_weights)
        if not weights:
            return self.max_queued_requests, self.max_queued_tokens
        weight = weights.setdefault(tenant, 1)
        total = sum(weights.values())
        return max(1, self.max_queued_requests * weight // total), max(1, self.max_queued_tokens * weight // total)

    @property
    def credit(self) -> int:
        """Service tokens that a tenant may be behind when it gets back in line while somebody of it runs."""
        return min(self.max_model_len, MAX_CREDIT)

    @property
    def max_steps_in_flight(self) -> int:
        return 2 if self.async_scheduling else 1


def parse_weights(text: str) -> tuple[tuple[str, int], ...]:
    """Weights as they are written after --tenant-weights: "gold=3,silver=2,bronze=1". Raises ConfigError."""
    pairs = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, weight = part.partition("=")
        if not (name.strip() and equals and weight.strip().isdecimal()):
            raise ConfigError(f"{part!r} is no name=weight; set --tenant-weights gold=3,silver=2,bronze=1")
        pairs.append((name.strip(), int(weight)))
    if text.strip() and not pairs:
        raise ConfigError(f"{text!r} holds no name=weight; set --tenant-weights gold=3,silver=2,bronze=1")
    return weight_pairs(pairs)


def weight_pairs(weights: Mapping[str, int] | Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """The weights as pairs, sorted by name. Raises ConfigError for one that is no positive integer."""
    pairs = sorted(weights.items() if isinstance(weights, Mapping) else weights)
    for name, weight in pairs:
        if not isinstance(weight, int) or isinstance(weight, bool) or not 1 <= weight <= MAX_WEIGHT:
            raise ConfigError(
                f"the weight of tenant {name!r} must be an integer from 1 to {MAX_WEIGHT}, not {weight!r}; "
                "set --tenant-weights gold=3,silver=2,bronze=1"
            )
    if len(dict(pairs)) < len(pairs):
        raise ConfigError("a tenant has two weights; set --tenant-weights gold=3,silver=2,bronze=1")
    return tuple(pairs)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def _flag(name: str) -> str:
    return f"set --{name.replace('_', '-')}"
