"""What every backend of paged attention takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class PagedBackend:
    """One way to run the op.

    `attend(q, cache, block_tables, kv_lens, *, scale, layer=0, window=None, softcap=None, sinks=None)` attends from
    q [rows, heads, head_dim], the last of its row's `kv_lens` [rows] cached tokens, and gives an output like q.
    The cache is laid out as `init_blocks` does; `layer` is an int or a traced int32. Entries of `block_tables` [rows,
    max_blocks] int32 past a row's length are never read and may hold anything. A row with `kv_lens` 0 is padding: its
    output is zero. `window`, `softcap` and `sinks` are those of ragged attention.
    """

    name: str
    attend: Callable[..., jax.Array]
