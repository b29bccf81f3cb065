"""What is timed and generated. Nothing here needs JAX, so that the peers' parts go without it."""

from pagedjax.models.config import ModelConfig

# Heads, KV heads, head_dim, block_size.
GQA4, GQA8, SMALL = (32, 8, 128, 16), (64, 8, 128, 16), (4, 2, 16, 8)

# name -> (shape, rows of (query tokens, cached tokens), dtype, type of a quantised cache)
DECODE = {
    "64 x 4k GQA 4": (GQA4, [(1, 4096)] * 64, "bfloat16", None),
    "64 x 4k GQA 8": (GQA8, [(1, 4096)] * 64, "bfloat16", None),
    "1 x 32k GQA 4": (GQA4, [(1, 32768)], "bfloat16", None),
    "64 x 4k GQA 4 fp8": (GQA4, [(1, 4096)] * 64, "bfloat16", "float8_e4m3fn"),
}
PREFILL = {
    "8 x 2k": (GQA4, [(2048, 2048)] * 8, "bfloat16"),
    "2 x 16k": (GQA4, [(16384, 16384)] * 2, "bfloat16"),
}
TINY_DECODE = {"tiny": (SMALL, [(1, 9), (1, 16)], "float32", None)}
TINY_PREFILL = {"tiny": (SMALL, [(8, 8), (6, 12)], "float32")}

# Of the engine's work, by whether it is the stand-in's.
NUM_SEQS = {False: 64, True: 4}
PROMPTS = {False: (16, 2048), True: (2, 40)}  # prompts, tokens each
GENERATED = {False: (128, 256), True: (6, 12)}  # tokens of the prompt, of the output

_ROPE = {"architecture": "LlamaForCausalLM", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    **_ROPE,
)
SMOLLM2 = ModelConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    **_ROPE,
)
TINY = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    **_ROPE,
)
