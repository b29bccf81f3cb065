"""Decode batches, shared by tests (reduced), the compile gate and the benchmark."""

from typing import NamedTuple

from pallas_kernels.attention import AttentionShape


class DecodeShape(NamedTuple):
    """`rows` query tokens over contexts of `kv_len` tokens; the table is wide enough for `max_len`."""

    rows: int
    kv_len: int
    max_len: int
    model: AttentionShape
    dtype: str = "bfloat16"
    kv_dtype: str | None = None


LLAMA_8B = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
# One of eight shards of a 70B model.
LLAMA_70B_SHARD = AttentionShape(num_heads=8, num_kv_heads=1, head_dim=128, block_size=16)
GPT_OSS = AttentionShape(num_heads=64, num_kv_heads=8, head_dim=64, block_size=16)
GEMMA = AttentionShape(num_heads=8, num_kv_heads=4, head_dim=256, block_size=32)
PHI = AttentionShape(num_heads=32, num_kv_heads=32, head_dim=80, block_size=64)
PHI3 = AttentionShape(num_heads=32, num_kv_heads=32, head_dim=96, block_size=8)
WIDE = AttentionShape(num_heads=16, num_kv_heads=1, head_dim=128, block_size=32)

SHAPES = {
    "8b-64x4k": DecodeShape(64, 4096, 8192, LLAMA_8B),
    "8b-1x32k": DecodeShape(1, 32768, 32768, LLAMA_8B),
    "8b-256x1k": DecodeShape(256, 1024, 8192, LLAMA_8B),
    "8b-64x4k-int8": DecodeShape(64, 4096, 8192, LLAMA_8B, kv_dtype="int8"),
    "8b-64x4k-float8": DecodeShape(64, 4096, 8192, LLAMA_8B, kv_dtype="float8_e4m3fn"),
    "70b-shard-64x4k": DecodeShape(64, 4096, 8192, LLAMA_70B_SHARD),
    "gpt-oss-64x4k": DecodeShape(64, 4096, 8192, GPT_OSS),
    "gemma-16x8k": DecodeShape(16, 8192, 8192, GEMMA),
    "phi-2-32x2k": DecodeShape(32, 2048, 2048, PHI),
    "phi-3-32x2k": DecodeShape(32, 2048, 4096, PHI3, dtype="float16"),
    "mqa-16x8k": DecodeShape(16, 8192, 8192, WIDE),
    "8b-8x2k-float32": DecodeShape(8, 2048, 2048, LLAMA_8B, dtype="float32"),
    "short-128x256": DecodeShape(128, 256, 256, LLAMA_8B),
}
