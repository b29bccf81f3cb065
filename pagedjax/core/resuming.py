"""Taking back what a preempted sequence had: at once what the device still has, through a fetch what a lower tier has.

A fetch brings blocks to a staging array, while others run. Meanwhile the sequence holds a slot and the blocks that it
will need, so that nothing else can be in its way; it runs, and its blocks are scattered into the cache, with the first
plan after the last of its transfers.
"""

from typing import NamedTuple

from pagedjax.core.blocks import BlockPool, forget, share, take
from pagedjax.core.effects import Effect, Fetch
from pagedjax.core.parking import private, unpark
from pagedjax.core.phases import Cause, next_phase
from pagedjax.core.plan import Row, Scatter, Tier
from pagedjax.core.prefix import Filled, longest_prefix, max_prefix_blocks
from pagedjax.core.state import Sequence, State
from pagedjax.core.tiers import LOWER_TIERS, Copy, Parked, Tiers, Transfer, start_transfer


class Start(NamedTuple):
    """Where a waiting sequence can start: behind `num_there` tokens that need not be computed.

    They are in `blocks` of the device and, behind these, in `num_fetched` copies of lower tiers. `next_name` is the
    block behind them, which a step may just be computing. The first row of a fork does not write.
    """

    blocks: tuple[int, ...]
    num_there: int
    num_fetched: int = 0
    next_name: bytes | None = None
    writes: bool = True
    shared_tail: frozenset[int] = frozenset()


def start_of(
    pool: BlockPool, pending: tuple[Filled, ...], sequence: Sequence, parked: Parked | None, block_size: int
) -> Start:
    """The longest prefix of a waiting sequence that is still somewhere."""
    names = sequence.block_hashes[: max_prefix_blocks(sequence.num_tokens, block_size)]
    if parked is not None and len(parked.names) >= len(names):
        names = parked.names
    blocks = longest_prefix(pool, pending, names)
    num_fetched = 0 if parked is None else max(0, len(parked.copies) - len(blocks))
    next_name = names[len(blocks)] if len(blocks) < len(names) and not num_fetched else None
    return Start(blocks, _num_tokens_in(len(blocks) + num_fetched, parked, block_size), num_fetched, next_name)


def start_fetch(
    pool: BlockPool, tiers: Tiers, sequence: Sequence, start: Start, block_size: int
) -> tuple[BlockPool, Tiers, Sequence, tuple[Effect, ...]]:
    """Hold the resident prefix and blocks for the copies behind it, and fetch these."""
    parked = tiers.parked[sequence.sequence_id]
    copies = tuple(enumerate(parked.copies))[len(start.blocks) :]
    pool = forget(share(pool, start.blocks), private(parked.names[: len(start.blocks)]))
    pool, taken = take(pool, start.num_fetched)
    blocks = start.blocks + taken
    effects: list[Effect] = []
    scatters: list[Scatter] = []
    for tier in LOWER_TIERS:
        here = [(index, copy) for index, copy in copies if copy.tier is tier]
        if here:
            tiers, fetch = _fetch(tiers, sequence.sequence_id, tier, here, parked)
            effects.append(fetch)
            scatters.append(Scatter(fetch.transfer_id, tuple([(n, blocks[i]) for n, (i, _) in enumerate(here)])))
    awaited = tuple([scatter.transfer_id for scatter in scatters])
    parked = parked._replace(awaited=awaited, scatters=tuple(scatters))
    tiers = tiers._replace(parked=tiers.parked.set(sequence.sequence_id, parked))
    sequence = sequence._replace(
        phase=next_phase(sequence.phase, Cause.FETCH),
        num_computed=start.num_there,
        num_planned=start.num_there,
        num_cached=start.num_there,
        blocks=blocks,
    )
    return pool, tiers, sequence, tuple(effects)


def land(state: State, rows: tuple[Row, ...]) -> tuple[State, tuple[Scatter, ...]]:
    """What the plan of these rows must scatter first: the blocks of those in it that have come back."""
    landing = set(state.tiers.landing)
    landed = landing.intersection([row.sequence_id for row in rows])
    pool, tiers = state.pool, state.tiers
    scatters: tuple[Scatter, ...] = ()
    for sequence in state.running:
        if sequence.sequence_id in landed:
            scatters += tiers.parked[sequence.sequence_id].scatters
            pool, tiers = unpark(pool, tiers, sequence, state.config.block_size)
    return state._replace(pool=pool, tiers=tiers), scatters


def _fetch(
    tiers: Tiers, sequence_id: int, tier: Tier, copies: list[tuple[int, Copy]], parked: Parked
) -> tuple[Tiers, Fetch]:
    block_ids = tuple([copy.block_id for _, copy in copies])
    names = tuple([parked.names[index] for index, _ in copies])
    transfer = Transfer(tier, block_ids, names, (sequence_id,), is_fetch=True)
    tiers, transfer_id = start_transfer(tiers, transfer)
    return tiers, Fetch(transfer_id, tier, block_ids)


def _num_tokens_in(num_blocks: int, parked: Parked | None, block_size: int) -> int:
    """Tokens in that many leading blocks. The last of those that the sequence had computed itself may be partial."""
    if parked is not None and num_blocks == len(parked.names):
        return min(parked.num_computed, num_blocks * block_size)
    return num_blocks * block_size
