"""Products of real models, shared by the tests (reduced), the benchmark and the gate."""

from typing import NamedTuple


class QuantShape(NamedTuple):
    num_in: int
    num_out: int
    group_size: int


MODELS = {
    "llama-3.1-8b qkv": QuantShape(4096, 6144, 128),
    "llama-3.1-8b o": QuantShape(4096, 4096, 128),
    "llama-3.1-8b gate_up": QuantShape(4096, 28672, 128),
    "llama-3.1-8b down": QuantShape(14336, 4096, 128),
    "llama-3.1-70b down": QuantShape(28672, 8192, 128),
    "qwen2.5-0.5b down, groups of 32": QuantShape(4864, 896, 32),
}
TOKENS = (1, 16, 64, 256)

# One property each: one group, many; groups smaller and larger than a tile; outputs that no tile divides.
SMALL = (
    QuantShape(128, 64, 128),
    QuantShape(512, 72, 128),
    QuantShape(96, 200, 32),
    QuantShape(192, 136, 64),
    QuantShape(768, 8, 256),
    QuantShape(352, 40, 352),
)
