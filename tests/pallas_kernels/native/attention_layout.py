"""Plain blocks [num_blocks, num_layers, block_size, kv_heads, head_dim] to the native backend's layout and back."""

import numpy as np

from pallas_kernels.ragged_attention import KVBlocks, native


def to_native(k: np.ndarray, v: np.ndarray) -> KVBlocks:
    """Padding is NaN where V's lies, or any byte; the backend writes K's itself, so a cached token has zeros there."""
    block_size, pack = k.shape[2], pack_of(k.dtype)
    k_dim, v_dim = native.padded(k.shape[-1])
    k, v = widened(k, k_dim, 0), widened(v, v_dim, 99 if v.dtype == np.int8 else np.nan)
    tile = 16 if block_size % 16 == 0 else 8
    tiled = (*k.shape[:2], block_size // tile, tile, k.shape[3], k_dim // pack, pack)
    k = k.reshape(tiled).transpose(0, 1, 4, 2, 5, 3, 6).reshape(*k.shape[:2], k.shape[3], -1)
    paired = (*v.shape[:2], block_size // pack, pack, v.shape[3], v_dim)
    v = v.reshape(paired).transpose(0, 1, 4, 2, 5, 3).reshape(*v.shape[:2], v.shape[3], -1)
    stored = native.STORED[k.dtype.name]
    return KVBlocks(k.view(stored), v.view(stored))


def from_native(cache: KVBlocks, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """K and V in the plain `shape`."""
    num_blocks, num_layers, block_size, kv_heads, head_dim = shape
    k_dim, v_dim = native.padded(head_dim)
    pack, tile = pack_of(dtype), 16 if block_size % 16 == 0 else 8
    k, v = (np.asarray(leaf).view(dtype) for leaf in cache[:2])
    k = k.reshape(num_blocks, num_layers, kv_heads, block_size // tile, k_dim // pack, tile, pack)
    k = k.transpose(0, 1, 3, 5, 2, 4, 6).reshape(*shape[:4], k_dim)
    v = v.reshape(num_blocks, num_layers, kv_heads, block_size // pack, v_dim, pack)
    v = v.transpose(0, 1, 3, 5, 2, 4).reshape(*shape[:4], v_dim)
    return k[..., :head_dim], v[..., :head_dim]


def pack_of(dtype: np.dtype) -> int:
    return 2 if dtype.name in ("bfloat16", "int8") else 1


def widened(x: np.ndarray, dim: int, fill: float) -> np.ndarray:
    wide = np.full((*x.shape[:-1], dim), fill, x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide
