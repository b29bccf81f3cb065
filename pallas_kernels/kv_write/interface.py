"""What every backend of KV write takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass

from pallas_kernels.kv_blocks import KVBlocks


@dataclass(frozen=True)
class KVWriteBackend:
    """One way to run the op.

    `write(k, v, cache, slots, *, layer=0)` gives the cache, laid out as `init_blocks` does, with k and v [tokens,
    kv_heads, head_dim] at `slots` [tokens] int32 (block_id * block_size + offset) of that layer (an int or a traced
    int32). A quantised cache takes `quantise`d values and their scales. Tokens of slots out of range, such as -1, are
    dropped; the others' slots are distinct. The cache is updated in place when the caller's jit donates it.
    """

    name: str
    write: Callable[..., KVBlocks]
