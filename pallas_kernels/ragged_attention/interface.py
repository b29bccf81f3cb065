"""What every backend of ragged attention takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from pallas_kernels.attention import AttentionNeed, AttentionShape, AttentionVariant, Scoring
from pallas_kernels.kv_blocks import KVBlocks

__all__ = ["AttentionBackend", "AttentionNeed", "AttentionShape", "AttentionVariant", "KVBlocks", "Ragged", "Scoring"]


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


@dataclass(frozen=True)
class AttentionBackend:
    """One way to run the op. The functions are module-level ones, so that backends compare and hash.

    `init_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, num_layers=1)` gives a cache whose numbers mean
    nothing yet; `dtype` is the computing one or, where the backend can, "int8" or "float8_e4m3fn", quantised as
    `kv_blocks` tells.
    `block_bytes(block_size, num_kv_heads, head_dim, dtype)` gives the bytes of one block of one layer, scales included.
    `attend(q, k, v, cache, ragged, *, scale, layer=0, window=None, softcap=None, sinks=None, max_q_len=None)` writes
    k, v [tokens, kv_heads, head_dim] at `ragged.slots` of that layer (an int or a traced int32), then attends causally
    from q [tokens, heads, head_dim] and gives (out like q, zero for padding tokens; the new cache). The cache is
    updated in place when the caller's jit donates it. Nobody writes slots out of range.
    * A token sees the last `window` tokens only, itself included: an int, or a traced int32 where `prefers_loop`.
    * A score s = scale * q·k becomes softcap * tanh(s / softcap).
    * `sinks` [heads] float32 are logits, neither scaled nor capped, that take part in each head's softmax and give
      nothing (arXiv:2309.17453, learnt as in gpt-oss).
    * `max_q_len` is a promise that no row has more query tokens, for backends that save work by it: at 1, decodes
      alone are computed. It never changes a result.
    `attend_turned(qkv, turns, cache, ragged, *, scale, layer=0)`, where there is one, does the same from one array
    [tokens, heads + 2 kv_heads, head_dim], its q and k first turned by rotary positions: cosines and sines
    [tokens, head_dim / 2], float32, of pairs of dimensions head_dim / 2 apart.
    `prefers_loop` says that compiling `attend` once a layer is dear, so that models had better loop over layers;
    `joins_layers` that unrolled layers, too, update one cache of them all in place; `prefers_decode_programs` that
    steps of decodes alone are worth programs of their own, with `max_q_len` 1.
    """

    name: str
    init_cache: Callable[..., KVBlocks]
    block_bytes: Callable[[int, int, int, Any], int]
    attend: Callable[..., tuple[jax.Array, KVBlocks]]
    prefers_loop: bool = False
    joins_layers: bool = False
    prefers_decode_programs: bool = False
    attend_turned: Callable[..., tuple[jax.Array, KVBlocks]] | None = None
