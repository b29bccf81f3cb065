"""What the gate compiles: one provider a line. Each runs in a process of its own.

A provider is a module with `cases(target) -> Iterable[Case]`, "h200" or "a100".
"""

PROVIDERS = (
    "ragged_attention",
    "paged_attention",
    "kv_write",
    "block_copy",
    "quant_matmul",
    "steps",
    "cache_steps",
    "quant_steps",
)
