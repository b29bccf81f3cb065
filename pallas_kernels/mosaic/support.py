"""Where Mosaic GPU kernels can run, and the parts of JAX that they need."""

from typing import Any

import jax
import jax.numpy as jnp

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:  # a jaxlib built without it
    plgpu = None

# TMA and wgmma come with Hopper; wgmma left again with Blackwell, whose tensor cores are programmed otherwise.
CAPABILITY = (9, 0)
DTYPES = ("bfloat16", "float16")
BLOCK_SIZES = (8, 16, 32, 64)
HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16


def api_gap() -> str | None:
    """What this JAX lacks, or None. JAX 0.10 names the arguments of `plgpu.kernel` otherwise."""
    if plgpu is None:
        return f"JAX {jax.__version__} has no Mosaic GPU"
    if not hasattr(plgpu, "InterpretGPUParams") or jax.__version_info__ < (0, 11):
        return f"JAX {jax.__version__} has another Mosaic GPU interface; the kernels need 0.11"
    return None


def refuse_shape(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: Any) -> str | None:
    """Why the kernels can't take these shapes anywhere, or None."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"dtype {name} is not one of {', '.join(DTYPES)}, which wgmma multiplies at full precision"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if block_size not in BLOCK_SIZES:
        return f"block_size {block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}"
    if num_heads // num_kv_heads > MAX_GROUP:
        return f"{num_heads // num_kv_heads} heads share a KV head, more than {MAX_GROUP}"
    return None
