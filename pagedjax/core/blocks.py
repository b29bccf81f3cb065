"""The block pool: who holds which block, which are free, and which are cached and idle.

A block is in exactly one of three places: *held* (its reference count is at least one), *idle* (count zero, but its
contents are still in the prefix cache; evicted in least-recently-used order) or *clean* (count zero, nothing to keep).
Every function takes a pool and returns a new one; the old one is unchanged and shares most of its memory with it.
"""

from typing import NamedTuple

from immutables import Map

from pagedjax.core.errors import SchedulerError


class BlockPool(NamedTuple):
    """All blocks of one memory tier.

    `clean` is a stack (index -> block id), `idle` a queue (ticket -> block id) with `idle_tickets` as its inverse;
    tickets grow from `idle_head` to `idle_tail` and leave holes where a block was taken from the middle.
    `cached` (hash -> block id) and its inverse `hash_of` are the prefix cache; a cached block is held or idle.
    """

    num_blocks: int
    counts: Map[int, int]
    clean: Map[int, int]
    idle: Map[int, int]
    idle_tickets: Map[int, int]
    idle_head: int
    idle_tail: int
    cached: Map[bytes, int]
    hash_of: Map[int, bytes]

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give: clean ones and idle ones."""
        return len(self.clean) + len(self.idle)


def make_pool(num_blocks: int) -> BlockPool:
    """A pool of clean blocks; block 0 is the first to be taken."""
    clean = Map({index: num_blocks - 1 - index for index in range(num_blocks)})
    return BlockPool(num_blocks, Map(), clean, Map(), Map(), 0, 0, Map(), Map())


def take(pool: BlockPool, num_blocks: int) -> tuple[BlockPool, tuple[int, ...]]:
    """Hold `num_blocks` blocks: clean ones first, then the least recently used idle ones, which leave the cache."""
    if num_blocks > pool.num_free:
        raise SchedulerError(f"{num_blocks} blocks asked for, {pool.num_free} free")
    if num_blocks > len(pool.clean):
        pool = _evict(pool, num_blocks - len(pool.clean))
    counts, clean = pool.counts.mutate(), pool.clean.mutate()
    top = len(pool.clean)
    taken = tuple(clean.pop(top - 1 - i) for i in range(num_blocks))
    for block_id in taken:
        counts[block_id] = 1
    return pool._replace(counts=counts.finish(), clean=clean.finish()), taken


def share(pool: BlockPool, block_ids: tuple[int, ...]) -> BlockPool:
    """Add one reference to each block, which is held or idle."""
    counts, idle, tickets = pool.counts.mutate(), pool.idle.mutate(), pool.idle_tickets.mutate()
    for block_id in block_ids:
        count = counts.get(block_id, 0)
        if count == 0:
            del idle[tickets.pop(block_id)]
        counts[block_id] = count + 1
    return pool._replace(counts=counts.finish(), idle=idle.finish(), idle_tickets=tickets.finish())


def give(pool: BlockPool, block_ids: tuple[int, ...]) -> BlockPool:
    """Drop one reference to each block of a table. The deepest block goes first, so that it is evicted first."""
    counts, clean = pool.counts.mutate(), pool.clean.mutate()
    idle, tickets, tail = pool.idle.mutate(), pool.idle_tickets.mutate(), pool.idle_tail
    num_clean = len(pool.clean)
    for block_id in reversed(block_ids):
        count = counts.pop(block_id)
        if count > 1:
            counts[block_id] = count - 1
        elif block_id in pool.hash_of:
            idle[tail], tickets[block_id] = block_id, tail
            tail += 1
        else:
            clean[num_clean] = block_id
            num_clean += 1
    return pool._replace(
        counts=counts.finish(), clean=clean.finish(), idle=idle.finish(), idle_tickets=tickets.finish(), idle_tail=tail
    )


def num_given_free(pool: BlockPool, block_ids: tuple[int, ...]) -> int:
    """How many of these blocks `give` would free."""
    return sum(pool.counts[block_id] == 1 for block_id in block_ids)


def register(pool: BlockPool, block_id: int, block_hash: bytes) -> BlockPool:
    """Enter a held block, whose keys and values have been computed, into the prefix cache.

    A second block with the same contents stays private: the first one keeps the entry.
    """
    if block_hash in pool.cached or block_id in pool.hash_of:
        return pool
    return pool._replace(
        cached=pool.cached.set(block_hash, block_id), hash_of=pool.hash_of.set(block_id, block_hash)
    )


def _evict(pool: BlockPool, num_blocks: int) -> BlockPool:
    """Turn the `num_blocks` least recently used idle blocks into clean ones."""
    clean, idle, tickets = pool.clean.mutate(), pool.idle.mutate(), pool.idle_tickets.mutate()
    cached, hash_of = pool.cached.mutate(), pool.hash_of.mutate()
    head, num_clean = pool.idle_head, len(pool.clean)
    for _ in range(num_blocks):
        while head not in idle:
            head += 1
        block_id = idle.pop(head)
        del tickets[block_id], cached[hash_of.pop(block_id)]
        clean[num_clean] = block_id
        num_clean += 1
    return pool._replace(
        clean=clean.finish(),
        idle=idle.finish(),
        idle_tickets=tickets.finish(),
        idle_head=head,
        cached=cached.finish(),
        hash_of=hash_of.finish(),
    )
