"""What all Pallas Triton kernels share: the import that may fail one day, and what they can't do anywhere.

Pallas Triton is deprecated in JAX and may go: then `plt` is None, and the kernels refuse with that reason.
"""

import warnings
from typing import Any

import jax

from pallas_kernels.attention import AttentionNeed

try:
    from jax.experimental.pallas import triton as plt
except ImportError:  # a JAX that has dropped it
    plt = None

# Said at each lowering; `refuse` is how the project finds out.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)

DTYPES = ("float32", "bfloat16", "float16")
GPUS = ("gpu", "cuda", "rocm")
# bfloat16 and asynchronous copies came with Ampere.
_CAPABILITY = (8, 0)
# Where the hardware converts to and from it.
_FLOAT8_CAPABILITY = (8, 9)


def refuse_interpreted(need: AttentionNeed) -> str | None:
    """Why the attention kernels can't run even in Pallas' interpreter, or None."""
    if plt is None:
        return f"JAX {jax.__version__} has no Pallas Triton any more"
    return refuse_shape(need)


def refuse_shape(need: AttentionNeed) -> str | None:
    """Why attention kernels in Triton, Pallas' or not, can't take these shapes, or None."""
    shape = need.shape
    group = shape.num_heads // shape.num_kv_heads
    if need.dtype.name not in DTYPES:
        return f"dtype {need.dtype.name} is not one of {', '.join(DTYPES)}"
    if shape.block_size & (shape.block_size - 1) or not 8 <= shape.block_size <= 64:
        return f"block_size {shape.block_size} is not a power of two from 8 to 64"
    if shape.head_dim > 256:
        return f"head_dim {shape.head_dim} is above 256: a tile would not fit the registers"
    if group > 64:
        return f"{group} heads share a KV head, more than the 64 that a tile packs"
    return None


def refuse(need: AttentionNeed) -> str | None:
    """Why the compiled attention kernels can't run there, or None."""
    return refuse_device(need.platform, need.capability) or refuse_float8(need) or refuse_interpreted(need)


def refuse_device(platform: str, capability: tuple[int, int] | None) -> str | None:
    """Why Triton's compiler, Pallas' or not, can't make anything for that device, or None. None: it is not known."""
    if platform not in GPUS:
        return f"Triton compiles for GPUs only, and this platform is {platform}"
    if capability is not None and capability < _CAPABILITY:
        return f"it needs compute capability {_in_words(_CAPABILITY)}, and this GPU has {_in_words(capability)}"
    return None


def refuse_float8(need: AttentionNeed) -> str | None:
    """Why kernels in Triton, Pallas' or not, can't read that cache there, or None."""
    known = need.capability or _FLOAT8_CAPABILITY
    if need.variant.kv_dtype == "float8_e4m3fn" and known < _FLOAT8_CAPABILITY:
        return f"compute capability {_in_words(known)} cannot convert float8_e4m3fn; 8.9 and newer can"
    return None


def _in_words(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def check_offsets(leaf: Any) -> None:
    """Raise NotImplementedError for an array that Pallas would address by 32 bits, and not reach the end of."""
    if leaf.dtype.itemsize == 1 and 2**31 < leaf.size <= 2**32:
        raise NotImplementedError(
            f"Pallas Triton reaches the first 2 GiB of a {leaf.dtype} array, or all of one above 4 GiB; "
            f"a layer's K takes {leaf.size} bytes"
        )


def power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << (n - 1).bit_length()
