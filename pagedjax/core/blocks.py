"""The block pool: who holds which block, which are free, and which are cached and idle.

A block is in exactly one of three places: *held* (its reference count is at least one), *idle* (count zero, but its
contents are still in the prefix cache; evicted in least-recently-used order) or *clean* (count zero, nothing to keep).
Every function takes a pool and returns a new one; the old one is unchanged and shares most of its memory with it.

Measured: an update costs 0.3-0.6 us, so each function changes its tables in one go, and a block's name, which its
holder knows, is stored beside it only while nobody holds it.
"""

from collections.abc import Iterable
from typing import NamedTuple

from immutables import Map

from pagedjax.core.errors import SchedulerError
from pagedjax.core.table import Table, pop_first, table_of


class BlockPool(NamedTuple):
    """All blocks of one memory tier.

    `clean` is a stack (index -> block id). `idle` is a queue (ticket -> block id and its name) and `idle_tickets` finds
    a block in it; tickets grow from `idle_head` to `idle_tail` and leave holes where a block was taken from the middle.
    `cached` (name -> block id) is the prefix cache; a cached block is held or idle.
    """

    num_blocks: int
    counts: Table[int]
    clean: Table[int]
    idle: Table[tuple[int, bytes]]
    idle_tickets: Table[int]
    idle_head: int
    idle_tail: int
    cached: Map[bytes, int]

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give: clean ones and idle ones."""
        return len(self.clean) + len(self.idle)


def make_pool(num_blocks: int) -> BlockPool:
    """A pool of clean blocks; block 0 is the first to be taken."""
    clean = table_of(range(num_blocks - 1, -1, -1))
    return BlockPool(num_blocks, Table(), clean, Table(), Table(), 0, 0, Map())


def take(pool: BlockPool, num_blocks: int) -> tuple[BlockPool, tuple[int, ...]]:
    """Hold `num_blocks` blocks: clean ones first, then the least recently used idle ones, which leave the cache."""
    if num_blocks == 0:
        return pool, ()
    num_clean = len(pool.clean)
    if num_blocks <= num_clean:
        return _take_clean(pool, num_blocks)
    if num_blocks > pool.num_free:
        raise SchedulerError(f"{num_blocks} blocks asked for, {pool.num_free} free")
    pool, clean = _take_clean(pool, num_clean)
    pool, evicted = _evict(pool, num_blocks - num_clean)
    return pool, clean + evicted


def share(pool: BlockPool, block_ids: tuple[int, ...]) -> BlockPool:
    """Add one reference to each block, which is held or idle."""
    counts, idle, tickets = pool.counts.mutate(), pool.idle.mutate(), pool.idle_tickets.mutate()
    for block_id in block_ids:
        count = counts.get(block_id)
        if count is None:
            idle.pop(tickets.pop(block_id))
        counts[block_id] = (count or 0) + 1
    return pool._replace(counts=counts.finish(), idle=idle.finish(), idle_tickets=tickets.finish())


def give(pool: BlockPool, block_ids: tuple[int, ...], names: tuple[bytes, ...]) -> BlockPool:
    """Drop one reference to each block of a table. The deepest block goes first, so that it is evicted first.

    `names` are those of the table's leading blocks; the cached ones among them become idle, the others clean.
    """
    counts, clean = pool.counts.mutate(), pool.clean.mutate()
    idle, tickets, tail = pool.idle.mutate(), pool.idle_tickets.mutate(), pool.idle_tail
    num_clean = len(clean)
    for index in range(len(block_ids) - 1, -1, -1):
        block_id = block_ids[index]
        count = counts.pop(block_id)
        name = names[index] if index < len(names) else None
        if count > 1:
            counts[block_id] = count - 1
        elif name is not None and pool.cached.get(name) == block_id:
            idle[tail], tickets[block_id] = (block_id, name), tail
            tail += 1
        else:
            clean[num_clean] = block_id
            num_clean += 1
    return pool._replace(
        counts=counts.finish(), clean=clean.finish(), idle=idle.finish(), idle_tickets=tickets.finish(), idle_tail=tail
    )


def register(pool: BlockPool, named_blocks: Iterable[tuple[bytes, int]]) -> BlockPool:
    """Enter held blocks, whose keys and values have been computed, into the prefix cache.

    A second block with the same contents stays private: the first one keeps the entry.
    """
    cached = pool.cached.mutate()
    for name, block_id in named_blocks:
        if name not in cached:
            cached[name] = block_id
    return pool._replace(cached=cached.finish())


def forget(pool: BlockPool, names: Iterable[bytes]) -> BlockPool:
    """Take blocks out of the prefix cache. The idle ones among them become clean; unknown names are ignored."""
    cached, clean = pool.cached.mutate(), pool.clean.mutate()
    idle, tickets = pool.idle.mutate(), pool.idle_tickets.mutate()
    for name in names:
        block_id = cached.pop(name, None)
        ticket = None if block_id is None else tickets.discard(block_id)
        if block_id is not None and ticket is not None:
            idle.discard(ticket)
            clean[len(clean)] = block_id
    return pool._replace(
        cached=cached.finish(), clean=clean.finish(), idle=idle.finish(), idle_tickets=tickets.finish()
    )


def _take_clean(pool: BlockPool, num_blocks: int) -> tuple[BlockPool, tuple[int, ...]]:
    counts, clean = pool.counts.mutate(), pool.clean.mutate()
    top = len(clean) - 1
    taken = tuple([clean.pop(index) for index in range(top, top - num_blocks, -1)])
    counts.set_all(taken, 1)
    return pool._replace(counts=counts.finish(), clean=clean.finish()), taken


def _evict(pool: BlockPool, num_blocks: int) -> tuple[BlockPool, tuple[int, ...]]:
    """Hold the `num_blocks` least recently used idle blocks, and take them out of the prefix cache."""
    idle, evicted, idle_head = pop_first(pool.idle, pool.idle_head, num_blocks)
    taken = [block_id for block_id, _ in evicted]
    counts, tickets, cached = pool.counts.mutate(), pool.idle_tickets.mutate(), pool.cached.mutate()
    counts.set_all(taken, 1)
    tickets.discard_all(taken)
    for _, name in evicted:
        del cached[name]
    pool = pool._replace(
        counts=counts.finish(),
        idle=idle,
        idle_tickets=tickets.finish(),
        # Emptied to its last page, the queue goes on at its tail, which lies within that page.
        idle_head=min(idle_head, pool.idle_tail),
        cached=cached.finish(),
    )
    return pool, tuple(taken)
