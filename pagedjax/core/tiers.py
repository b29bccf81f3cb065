"""The tiers below the device: where blocks of preempted sequences lie in the host's memory or on disk.

Each tier is a `BlockPool` of its own. There a block is *held* by the parked sequences whose copy it is and by the
transfer that reads or writes it, *idle* when it is the copy of a block that is back on the device (so that the next
preemption need not copy it again; evicted when room is needed) or *clean*. A copy is found by the name of its block:
equal names mean equal contents, so sequences with one prefix share its copies, and "dirty" means "no pool knows the
name". A copy has its name from the moment its transfer starts, but it is read only when that has ended.
"""

from collections.abc import Iterable
from typing import NamedTuple

from immutables import Map

from pagedjax.core.blocks import BlockPool, forget, give, make_pool, register, share, take
from pagedjax.core.plan import Scatter, Tier

LOWER_TIERS = (Tier.HOST, Tier.DISK)  # the nearest first


class Copy(NamedTuple):
    """A block of a lower tier."""

    tier: Tier
    block_id: int


class Transfer(NamedTuple):
    """A SwapOut or a Fetch under way. It holds one reference to each of its blocks in `tier`.

    `sequence_ids` are the parked sequences that wait for it.
    """

    tier: Tier
    block_ids: tuple[int, ...]
    names: tuple[bytes, ...]
    sequence_ids: tuple[int, ...]
    is_fetch: bool


class Parked(NamedTuple):
    """What is left of a preempted sequence's `num_computed` tokens: the names of the blocks that held them.

    The device may still have some of them, idle; `copies` of the leading ones are held in lower tiers. While they are
    fetched, `awaited` are the transfers that have not ended, and `scatters` what the next plan must do.
    """

    names: tuple[bytes, ...]
    num_computed: int
    copies: tuple[Copy, ...] = ()
    awaited: tuple[int, ...] = ()
    scatters: tuple[Scatter, ...] = ()


class Tiers(NamedTuple):
    """`landing` are running sequences whose fetched blocks the next plan that contains them scatters."""

    host: BlockPool
    disk: BlockPool
    parked: Map[int, Parked] = Map()
    transfers: Map[int, Transfer] = Map()
    landing: tuple[int, ...] = ()
    next_transfer_id: int = 0

    @property
    def are_absent(self) -> bool:
        return not self.host.num_blocks and not self.disk.num_blocks


Moves = list[tuple[int, Copy]]


def make_tiers(num_host_blocks: int, num_disk_blocks: int) -> Tiers:
    return Tiers(make_pool(num_host_blocks), make_pool(num_disk_blocks))


def pool_of(tiers: Tiers, tier: Tier) -> BlockPool:
    return tiers.host if tier is Tier.HOST else tiers.disk


def with_pool(tiers: Tiers, tier: Tier, pool: BlockPool) -> Tiers:
    return tiers._replace(host=pool) if tier is Tier.HOST else tiers._replace(disk=pool)


def find_copy(tiers: Tiers, name: bytes) -> Copy | None:
    """The copy of a named block, if there is one; it may still be on its way."""
    for tier in LOWER_TIERS:
        block_id = pool_of(tiers, tier).cached.get(name)
        if block_id is not None:
            return Copy(tier, block_id)
    return None


def hold_copies(tiers: Tiers, names: tuple[bytes, ...]) -> tuple[Tiers, tuple[Copy, ...]]:
    """Hold the copies that there are of the longest run of leading names."""
    copies: list[Copy] = []
    for name in names:
        copy = find_copy(tiers, name)
        if copy is None:
            break
        copies.append(copy)
    return share_copies(tiers, copies), tuple(copies)


def reserve_copies(tiers: Tiers, names: tuple[bytes, ...]) -> tuple[Tiers, tuple[Copy, ...], Moves]:
    """Hold copies of as many leading names as there is room for, the nearest tier first.

    Also gives the moves that are due: (index of the name, its new copy) where there was none.
    """
    known = [find_copy(tiers, name) for name in names]
    tiers = share_copies(tiers, [copy for copy in known if copy])  # held, they cannot be evicted for the others
    missing = [index for index, copy in enumerate(known) if copy is None]
    copies, moves = dict(enumerate(known)), []
    for tier in LOWER_TIERS:
        num_here = min(len(missing), pool_of(tiers, tier).num_free)
        indices, missing = missing[:num_here], missing[num_here:]
        pool, block_ids = take(pool_of(tiers, tier), num_here)
        pool = register(pool, [(names[index], block_id) for index, block_id in zip(indices, block_ids)])
        tiers = with_pool(tiers, tier, pool)
        moves += [(index, Copy(tier, block_id)) for index, block_id in zip(indices, block_ids)]
    copies.update(moves)
    end = missing[0] if missing else len(names)
    behind = [(copy, names[index]) for index, copy in copies.items() if copy and index > end]
    tiers = give_copies(tiers, [copy for copy, _ in behind], [name for _, name in behind])
    return tiers, tuple([copy for index, copy in sorted(copies.items()) if copy and index < end]), moves


def share_copies(tiers: Tiers, copies: Iterable[Copy]) -> Tiers:
    for tier, block_ids, _ in _by_tier(copies, ()):
        tiers = with_pool(tiers, tier, share(pool_of(tiers, tier), block_ids))
    return tiers


def give_copies(tiers: Tiers, copies: Iterable[Copy], names: Iterable[bytes]) -> Tiers:
    """Drop one reference to each copy; `names` are those of their blocks. Where it was the last, the copy is idle."""
    for tier, block_ids, its_names in _by_tier(copies, names):
        tiers = with_pool(tiers, tier, give(pool_of(tiers, tier), block_ids, its_names))
    return tiers


def forget_copies(tiers: Tiers, names: Iterable[bytes]) -> Tiers:
    """From now on there is no copy of these blocks: they have been given up, or cannot be read."""
    names = tuple(names)
    for tier in LOWER_TIERS:
        if pool_of(tiers, tier).cached:
            tiers = with_pool(tiers, tier, forget(pool_of(tiers, tier), names))
    return tiers


def start_transfer(tiers: Tiers, transfer: Transfer) -> tuple[Tiers, int]:
    transfer_id = tiers.next_transfer_id
    tiers = share_copies(tiers, [Copy(transfer.tier, block_id) for block_id in transfer.block_ids])
    transfers = tiers.transfers.set(transfer_id, transfer)
    return tiers._replace(transfers=transfers, next_transfer_id=transfer_id + 1), transfer_id


def end_transfer(tiers: Tiers, transfer_id: int) -> Tiers:
    transfer = tiers.transfers[transfer_id]
    tiers = tiers._replace(transfers=tiers.transfers.delete(transfer_id))
    copies = [Copy(transfer.tier, block_id) for block_id in transfer.block_ids]
    return give_copies(tiers, copies, transfer.names)


def await_writes(tiers: Tiers, sequence_id: int, copies: tuple[Copy, ...]) -> Tiers:
    """Let a sequence that holds `copies` wait for the transfers that write any of them."""
    transfers, wanted = tiers.transfers, set(copies)
    for transfer_id, transfer in tiers.transfers.items():
        written = any(Copy(transfer.tier, block_id) in wanted for block_id in transfer.block_ids)
        if written and not transfer.is_fetch and sequence_id not in transfer.sequence_ids:
            waiters = (*transfer.sequence_ids, sequence_id)
            transfers = transfers.set(transfer_id, transfer._replace(sequence_ids=waiters))
    return tiers._replace(transfers=transfers)


def is_being_written(tiers: Tiers, sequence_id: int) -> bool:
    """Whether any copy of a parked sequence is still on its way to its tier."""
    return any(not t.is_fetch and sequence_id in t.sequence_ids for t in tiers.transfers.values())


def _by_tier(copies: Iterable[Copy], names: Iterable[bytes]) -> list[tuple[Tier, tuple[int, ...], tuple[bytes, ...]]]:
    """The copies of each tier that has any, and their names (none where `names` is empty)."""
    copies, names = tuple(copies), tuple(names)
    found = []
    for tier in LOWER_TIERS:
        indices = [index for index, copy in enumerate(copies) if copy.tier is tier]
        if indices:
            its_names = tuple([names[index] for index in indices]) if names else ()
            found.append((tier, tuple([copies[index].block_id for index in indices]), its_names))
    return found
