"""What a step and a transfer cost, as plain numbers: the simulator's stand-in for a device.

A step reads all weights once, whatever it holds, so few tokens cost as much as some more; beyond that its arithmetic
grows with its tokens. Attention reads each row's context once and multiplies every new token with every token before
it. All of it adds up:

    fixed + max(weights, tokens * us_per_token) + rows * us_per_row
          + context * us_per_context_token + pairs * us_per_pair

where tokens are rounded up to the size of the program that takes them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import ceil
from types import MappingProxyType

from pagedjax.core.errors import ConfigError
from pagedjax.core.plan import Row, StepPlan, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One way between the device and a lower tier; both directions are alike and work at the same time."""

    us_per_transfer: float
    bytes_per_us: float

    def __post_init__(self) -> None:
        if self.us_per_transfer < 0 or not self.bytes_per_us > 0:
            raise ConfigError(f"a link needs a start of at least 0 us and a bandwidth above 0, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs in microseconds. `source` says where the numbers come from.

    `token_sizes`, rising, are the sizes of step programs; a step larger than all of them is not rounded. `host_us`
    passes from planning a step to its start on an idle device; with a step in flight it hides behind it.
    `us_per_block_copied` is the device's own time for a block that is gathered, scattered or copied.
    Raises ConfigError.
    """

    source: str
    token_sizes: tuple[int, ...] = ()
    fixed_us: float
    weights_us: float
    us_per_token: float
    us_per_row: float
    us_per_context_token: float
    us_per_pair: float
    host_us: float
    block_bytes: int
    us_per_block_copied: float
    host: Link
    disk: Link

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name not in ("source", "token_sizes", "host", "disk")):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, it is {getattr(self, name)}")

    def step_us(self, plan: StepPlan) -> int:
        """The device's time for one step, the scatters that it begins with included."""
        return self.rows_us(plan.rows) + self.copies_us(sum(len(scatter.pairs) for scatter in plan.scatters))

    def rows_us(self, rows: Iterable[Row]) -> int:
        num_tokens = num_rows = num_context = num_pairs = 0
        for row in rows:
            num_rows += 1
            num_tokens += row.length
            num_context += row.start + row.length
            num_pairs += row.length * row.start + row.length * (row.length + 1) // 2
        num_tokens = next((size for size in self.token_sizes if size >= num_tokens), num_tokens)
        linear = max(self.weights_us, num_tokens * self.us_per_token) + num_rows * self.us_per_row
        attention = num_context * self.us_per_context_token + num_pairs * self.us_per_pair
        return ceil(self.fixed_us + linear + attention)

    def copies_us(self, num_blocks: int) -> int:
        """The device's time for blocks that it copies within its memory."""
        return ceil(num_blocks * self.us_per_block_copied)

    def transfer_us(self, tier: Tier, num_blocks: int) -> int:
        """The link's time for blocks between the device and a lower tier."""
        link = self.disk if tier is Tier.DISK else self.host
        return ceil(link.us_per_transfer + num_blocks * self.block_bytes / link.bytes_per_us)

    def swap_us_per_block(self) -> int:
        """One block, one way, to the host and among many others: what the scheduler's configuration asks for."""
        return ceil(self.block_bytes / self.host.bytes_per_us + self.us_per_block_copied)

    def recompute_us_per_token(self) -> int:
        """A prompt token in a large chunk with little before it: what the scheduler's configuration asks for."""
        return max(1, ceil(self.us_per_token))


# Fitted by least squares to the steps of benchmarks/results/kernels.json, which it repeats to 9 % in all but two cases
# (tests/simulator/test_cost.py). A block of 16 tokens has 30 layers x 2 x 3 heads x 64 x 2 bytes each. The links stand
# for copies within main memory and for one drive, and are assumed.
CPU_XLA = CostModel(
    source="SmolLM2-135M, bfloat16, XLA on 2 cores of an AMD EPYC: steps as measured at commit 1ea9c95, links assumed",
    token_sizes=(1, 8, 16, 32, 48, 64, 96, 128, 192, 256),
    fixed_us=0,
    weights_us=30_000,
    us_per_token=960,
    us_per_row=510,
    us_per_context_token=8.0,
    us_per_pair=0.83,
    host_us=1_000,
    block_bytes=16 * 30 * 2 * 3 * 64 * 2,
    us_per_block_copied=60,
    host=Link(us_per_transfer=200, bytes_per_us=5_000),
    disk=Link(us_per_transfer=1_000, bytes_per_us=500),
)

# A model of 8.03e9 parameters in bfloat16 with 32 layers and 8 of 32 heads for keys and values, each of 128. Weights
# and context at 80 % of 4.3 TB/s, products at 60 % of 790 TFLOP/s: rates measured on an H200, of which good kernels
# reach such shares; no step of this engine has been timed there.
# Links: PCIe 5 x16 and one NVMe drive, as their makers state them.
H200_LIKE = CostModel(
    source="8B Llama shape in bfloat16; computed from an H200's measured 4.3 TB/s and 790 TFLOP/s, PCIe 5 and NVMe",
    fixed_us=500,
    weights_us=2 * 8.03e9 / (0.8 * 4.3e6),
    us_per_token=2 * 8.03e9 / (0.6 * 790e6),
    us_per_row=2,
    us_per_context_token=32 * 2 * 8 * 128 * 2 / (0.8 * 4.3e6),
    us_per_pair=32 * 4 * 32 * 128 / (0.6 * 790e6),
    host_us=1_000,
    block_bytes=16 * 32 * 2 * 8 * 128 * 2,
    us_per_block_copied=2 * 16 * 32 * 2 * 8 * 128 * 2 / (0.8 * 4.3e6),
    host=Link(us_per_transfer=20, bytes_per_us=50_000),
    disk=Link(us_per_transfer=100, bytes_per_us=6_000),
)

PRESETS = MappingProxyType({"cpu-xla": CPU_XLA, "h200-like": H200_LIKE})
