"""KV write as XLA's scatter, one a leaf, in place under donation.

A KV head of a token is one row of the flat leaf. Bytes: k and v read once, their rows written once. Limits: none.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_blocks import KVBlocks, stored_as, write_slots
from pallas_kernels.kv_write.interface import KVWriteBackend


def write(k: jax.Array, v: jax.Array, cache: KVBlocks, slots: jax.Array, *, layer: int | jax.Array = 0) -> KVBlocks:
    """See `KVWriteBackend`."""
    num_blocks, num_layers, kv_heads, block_size = cache.k.shape[:4]
    inside = (slots >= 0) & (slots < num_blocks * block_size)
    heads = ((slots // block_size * num_layers + layer) * kv_heads)[:, None] + jnp.arange(kv_heads)
    rows = jnp.where(inside[:, None], heads * block_size + (slots % block_size)[:, None], -1).reshape(-1)

    def put(leaf: jax.Array, values: jax.Array) -> jax.Array:
        rest = leaf.shape[4:]
        flat = write_slots(leaf.reshape(-1, *rest), values.reshape(-1, *rest), rows)
        return flat.reshape(leaf.shape)

    return jax.tree.map(put, cache, stored_as(k, v, cache.k.dtype))


BACKEND = KVWriteBackend("xla", write)
