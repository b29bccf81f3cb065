"""What every backend of ragged attention takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Ragged(NamedTuple):
    """How packed query tokens map to rows, and where each row's keys and values lie. All int32.

    Row r owns the packed tokens `q_starts[r] .. q_starts[r + 1] - 1`, which are the last ones of its `kv_lens[r]`
    cached tokens. Rows past the last real one are padding: empty, `kv_lens` 0. Tokens past `q_starts[-1]` are padding.
    """

    block_tables: jax.Array  # [rows, max_blocks]; entries past a row's length are never read and may hold anything
    q_starts: jax.Array  # [rows + 1]
    kv_lens: jax.Array  # [rows] cached tokens, this step's included
    slots: jax.Array  # [tokens] block_id * block_size + offset that takes the token's K and V; -1: none
    num_decode_rows: jax.Array  # [] leading rows with exactly one query token: row r is packed token r


class KVBlocks(NamedTuple):
    """The cache of one layer or of several. Axis 0 of each leaf counts blocks; the rest belongs to the backend.

    Layers lie behind blocks: a block's bytes of all layers are one run, to be moved between memories at once.
    """

    k: jax.Array
    v: jax.Array


class AttentionShape(NamedTuple):
    """What stays the same from step to step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class AttentionBackend:
    """One way to run the op. The functions are module-level ones, so that backends compare and hash.

    `init_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, num_layers=1)` gives a zeroed cache.
    `block_bytes(block_size, num_kv_heads, head_dim, dtype)` gives the bytes of one block of one layer.
    `attend(q, k, v, cache, ragged, *, scale, layer=0)` writes k, v [tokens, kv_heads, head_dim] at `ragged.slots` of
    that layer (an int or a traced int32), then attends causally from q [tokens, heads, head_dim] and gives (out like q,
    zero for padding tokens; the new cache). The cache is updated in place when the caller's jit donates it.
    `attend_turned(qkv, turns, cache, ragged, *, scale, layer=0)`, where there is one, does the same from one array
    [tokens, heads + 2 kv_heads, head_dim], its q and k first turned by rotary positions: cosines and sines
    [tokens, head_dim / 2], float32, of pairs of dimensions head_dim / 2 apart.
    `prefers_loop` says that compiling `attend` once a layer is dear, so that models had better loop over layers;
    `joins_layers` that unrolled layers, too, update one cache of them all in place.
    """

    name: str
    init_cache: Callable[..., KVBlocks]
    block_bytes: Callable[[int, int, int, Any], int]
    attend: Callable[..., tuple[jax.Array, KVBlocks]]
    prefers_loop: bool = False
    joins_layers: bool = False
    attend_turned: Callable[..., tuple[jax.Array, KVBlocks]] | None = None


def kv_block_bytes(block_size: int, num_kv_heads: int, head_dim: int, dtype: Any) -> int:
    """Bytes of one block of one layer where K and V are kept plain, without padding or scales."""
    return 2 * block_size * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize


def write_slots(flat: jax.Array, values: jax.Array, slots: jax.Array) -> jax.Array:
    """`flat` [slots, …] with `values` [tokens, …] at `slots`; tokens of slot -1 are dropped."""
    # A negative index would wrap to the end; only one past the end is dropped. Two rows at least, since XLA turns
    # a scatter of one row into a dynamic-update-slice that copies the cache.
    slots = jnp.where(slots < 0, flat.shape[0], slots)
    if slots.shape[0] == 1:
        slots = jnp.concatenate([slots, jnp.full_like(slots, flat.shape[0])])
        values = jnp.concatenate([values, values])
    return flat.at[slots].set(values.astype(flat.dtype), mode="drop")
