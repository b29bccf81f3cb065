"""Shapes of real models, shared by the tests (reduced), the benchmark and the tuning."""

from pallas_kernels.ragged_attention.interface import AttentionShape

MODELS = {
    "smollm2-135m": AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16),
    "smollm2-360m": AttentionShape(num_heads=15, num_kv_heads=5, head_dim=64, block_size=16),
    "llama-3.2-1b": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=64, block_size=16),
    "llama-3.1-8b": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16),
    "open-llama-3b": AttentionShape(num_heads=32, num_kv_heads=32, head_dim=100, block_size=16),
    "phi-2-shaped": AttentionShape(num_heads=32, num_kv_heads=32, head_dim=80, block_size=16),
}

# One property each: plain multi-head, wide groups, a single KV head, odd head counts, every block size and head_dim.
SMALL = (
    AttentionShape(num_heads=4, num_kv_heads=4, head_dim=64, block_size=8),
    AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16),
    AttentionShape(num_heads=16, num_kv_heads=1, head_dim=80, block_size=32),
    AttentionShape(num_heads=10, num_kv_heads=5, head_dim=128, block_size=64),
    AttentionShape(num_heads=1, num_kv_heads=1, head_dim=64, block_size=16),
)
