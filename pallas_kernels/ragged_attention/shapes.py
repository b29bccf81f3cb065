"""Shapes of real models, shared by the tests (reduced), the benchmark and the tuning."""

from pallas_kernels.attention import AttentionShape, AttentionVariant

MODELS = {
    "smollm2-135m": AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16),
    "smollm2-360m": AttentionShape(num_heads=15, num_kv_heads=5, head_dim=64, block_size=16),
    "llama-3.2-1b": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=64, block_size=16),
    "llama-3.1-8b": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16),
    "open-llama-3b": AttentionShape(num_heads=32, num_kv_heads=32, head_dim=100, block_size=16),
    "phi-2-shaped": AttentionShape(num_heads=32, num_kv_heads=32, head_dim=80, block_size=16),
}

# Every head_dim, group, block size, kind of cache and part of a model's attention, for the compile gate:
# (shape, dtype, variant).
VARIED = {
    "int8": (MODELS["llama-3.1-8b"], "bfloat16", AttentionVariant(kv_dtype="int8")),
    "float8": (MODELS["llama-3.1-8b"], "bfloat16", AttentionVariant(kv_dtype="float8_e4m3fn")),
    "window, sinks": (AttentionShape(64, 8, 64, 16), "bfloat16", AttentionVariant(window=True, sinks=True)),
    "soft-cap": (AttentionShape(8, 4, 256, 32), "bfloat16", AttentionVariant(softcap=True)),
    "wide, int8": (AttentionShape(8, 4, 256, 32), "bfloat16", AttentionVariant(kv_dtype="int8")),
    "wide, float32": (AttentionShape(8, 4, 256, 8), "float32", AttentionVariant()),
    "wide, float32, int8": (AttentionShape(8, 8, 256, 16), "float32", AttentionVariant(kv_dtype="int8")),
    "96, all": (AttentionShape(32, 32, 96, 8), "float16", AttentionVariant(True, True, True, "int8")),
    "80": (AttentionShape(32, 32, 80, 64), "float16", AttentionVariant()),
    "group 16": (AttentionShape(16, 1, 128, 32), "bfloat16", AttentionVariant(kv_dtype="float8_e4m3fn")),
    "group 7, float32": (AttentionShape(28, 4, 128, 16), "float32", AttentionVariant(window=True)),
}

# One property each: plain multi-head, wide groups, a single KV head, odd head counts, every block size and head_dim.
SMALL = (
    AttentionShape(num_heads=4, num_kv_heads=4, head_dim=64, block_size=8),
    AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16),
    AttentionShape(num_heads=16, num_kv_heads=1, head_dim=80, block_size=32),
    AttentionShape(num_heads=10, num_kv_heads=5, head_dim=128, block_size=64),
    AttentionShape(num_heads=1, num_kv_heads=1, head_dim=64, block_size=16),
)
