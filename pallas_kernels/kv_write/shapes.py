"""Shapes shared by tests and the compile gate: decodes and chunks of Llama, odd head_dims, every block size.

(tokens, KV heads, head_dim, block_size, cache dtype or None)
"""

SHAPES = (
    (1, 8, 128, 16, None),
    (64, 8, 128, 16, None),
    (2048, 8, 128, 16, None),
    (64, 8, 128, 16, "int8"),
    (2048, 8, 128, 32, "float8_e4m3fn"),
    (37, 3, 64, 8, "int8"),
    (5, 1, 80, 64, "float8_e4m3fn"),
    (33, 5, 96, 32, None),
    (48, 2, 256, 16, "int8"),
)
