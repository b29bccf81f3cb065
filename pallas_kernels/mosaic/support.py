"""Where Mosaic GPU kernels can run, and the parts of JAX that they need."""

from typing import Any

import jax

from pallas_kernels.attention import AttentionNeed

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:  # a jaxlib built without it
    plgpu = None

# TMA and wgmma came with Hopper; wgmma left again with Blackwell, whose tensor cores are programmed otherwise.
CAPABILITY = 9
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


def refuse_device(platform: str, capability: tuple[int, int] | None) -> str | None:
    """Why compiled kernels can't run on that device, or None."""
    if platform not in ("gpu", "cuda"):
        return f"Mosaic GPU compiles for Nvidia's GPUs only, and this platform is {platform}"
    if capability is None:
        return f"it needs compute capability {CAPABILITY}.0, and this GPU's is unknown"
    if capability[0] != CAPABILITY:
        return f"it needs compute capability {CAPABILITY}.0 (wgmma), and this GPU has {'.'.join(map(str, capability))}"
    return None


def refuse_shape(need: AttentionNeed) -> str | None:
    """Why the kernels can't take these shapes anywhere, or None."""
    shape, group = need.shape, need.shape.num_heads // need.shape.num_kv_heads
    if need.dtype.name not in DTYPES:
        return f"dtype {need.dtype.name} is not one of {', '.join(DTYPES)}: wgmma would round it"
    if need.variant.kv_dtype is not None:
        return f"it has no cache in {need.variant.kv_dtype}: wgmma takes K and V as they lie"
    if shape.head_dim not in HEAD_DIMS:
        return f"head_dim {shape.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if shape.block_size not in BLOCK_SIZES:
        return f"block_size {shape.block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}"
    if group > MAX_GROUP:
        return f"{group} heads share a KV head, more than the {MAX_GROUP} that a tile takes"
    return None


def interpreter() -> Any:
    """The interpreter, told to look for races. Where there is none the kernels can't be interpreted: `api_gap`."""
    return plgpu.InterpretGPUParams(detect_races=True)
