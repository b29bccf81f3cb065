"""Parking: what happens to the blocks of a preempted sequence.

It gives up its references, no more: the blocks go to the device's idle queue under their names (a *private* name where
the prefix cache knows none), so that only those which somebody needs are evicted, the deepest first. If it is to be
swapped, the blocks that no lower tier has yet are copied out at once, in one gather; after that evicting them costs
nothing, and what was not evicted is simply there when the sequence resumes. (Copying at eviction instead would move
fewer bytes, but in many small transfers, each in the way of the step that needs the block.)
"""

from pagedjax.core.blocks import BlockPool, forget, give, register
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Discard, Effect, SwapOut
from pagedjax.core.phases import Phase
from pagedjax.core.prefix import max_prefix_blocks
from pagedjax.core.state import Sequence
from pagedjax.core.tiers import (
    LOWER_TIERS,
    Moves,
    Parked,
    Tiers,
    Transfer,
    await_writes,
    forget_copies,
    give_copies,
    hold_copies,
    is_being_written,
    reserve_copies,
    start_transfer,
)


def park(
    pool: BlockPool, tiers: Tiers, sequence: Sequence, config: SchedulerConfig
) -> tuple[BlockPool, Tiers, tuple[Effect, ...]]:
    """Give up a sequence's blocks, and say what is left of it in `tiers.parked`. It is in no plan in flight."""
    parked = tiers.parked.get(sequence.sequence_id)
    if parked is not None:  # it never landed: its copies are held still
        pool = give(pool, sequence.blocks, sequence.block_hashes)
        return pool, *_cancel_fetch(tiers, sequence.sequence_id, parked)
    names = names_of(sequence, config.block_size)
    swaps = _pays_to_swap(pool, tiers, sequence, config)
    # A block that others hold may get another name or be written by them, so it is found only by a name that they know.
    own = [(name, block_id) for name, block_id in zip(names, sequence.blocks) if pool.counts[block_id] == 1]
    pool = give(register(pool, own), sequence.blocks, names)
    if not swaps:
        return pool, _with_parked(tiers, sequence, Parked(names, _num_kept(sequence))), ()
    tiers, copies, moves = reserve_copies(tiers, names)
    tiers = _with_parked(tiers, sequence, Parked(names, _num_kept(sequence), copies))
    tiers = await_writes(tiers, sequence.sequence_id, copies)
    return pool, *_swap_out(tiers, sequence, names, moves)


def park_without_device(tiers: Tiers, sequence: Sequence, block_size: int) -> tuple[Tiers, tuple[Effect, ...]]:
    """The same when the device has lost all its blocks: what lower tiers have is all that is left."""
    parked = tiers.parked.get(sequence.sequence_id)
    if parked is not None:
        return _cancel_fetch(tiers, sequence.sequence_id, parked)
    names = names_of(sequence, block_size)
    tiers, copies = hold_copies(tiers, names)
    tiers = _with_parked(tiers, sequence, Parked(names, _num_kept(sequence), copies))
    return await_writes(tiers, sequence.sequence_id, copies), ()


def unpark(pool: BlockPool, tiers: Tiers, sequence: Sequence, block_size: int) -> tuple[BlockPool, Tiers]:
    """A parked sequence runs again: its names become its own affair, and its copies of full blocks idle."""
    parked = tiers.parked.get(sequence.sequence_id)
    if parked is None:
        return pool, tiers
    pool = forget(pool, private(parked.names))
    tiers = _give_up_copies(tiers, parked)
    num_full = parked.num_computed // block_size
    tiers = forget_copies(tiers, parked.names[num_full:])  # the block behind the last full one will be written
    landing = tuple([i for i in tiers.landing if i != sequence.sequence_id])
    return pool, tiers._replace(parked=tiers.parked.delete(sequence.sequence_id), landing=landing)


def let_go(
    pool: BlockPool, tiers: Tiers, sequence: Sequence, block_size: int
) -> tuple[BlockPool, Tiers, tuple[Effect, ...]]:
    """A sequence ends: nothing of it stays in any tier but what the prefix cache knows it by."""
    effects: tuple[Effect, ...] = ()
    parked = tiers.parked.get(sequence.sequence_id)
    if parked is not None:
        tiers, effects = _cancel_fetch(tiers, sequence.sequence_id, parked)
        pool = forget(pool, private(parked.names))
        tiers = forget_copies(_give_up_copies(tiers, parked), private(parked.names))
        tiers = tiers._replace(parked=tiers.parked.delete(sequence.sequence_id))
    elif not sequence.block_hashes and not tiers.are_absent:
        tiers = forget_copies(tiers, private(names_of(sequence, block_size)))
    return pool, tiers, effects


def names_of(sequence: Sequence, block_size: int) -> tuple[bytes, ...]:
    """The names of the blocks that hold a sequence's computed tokens.

    A full block without a hash has a name that no other sequence can have. So has a partial one, which also says how
    many tokens it holds; it is of use only to a sequence that had computed all but its last token, since behind the
    middle of a prompt the prefix cache may know full blocks.
    """
    num_full, num_more = divmod(_num_kept(sequence), block_size)
    names = sequence.block_hashes[:num_full]
    sequence_id = sequence.sequence_id
    names += tuple([b"%d:%d" % (sequence_id, index) for index in range(len(names), num_full)])
    if num_more and (not sequence.block_hashes or num_full == max_prefix_blocks(sequence.num_tokens, block_size)):
        names += (b"%d:%d+%d" % (sequence_id, num_full, num_more),)
    return names


def private(names: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Those that are no hashes, which have 32 bytes. (Sequence ids are far below 10^20.)"""
    return tuple([name for name in names if len(name) < 32])


def phase_of(tiers: Tiers, sequence_id: int) -> Phase:
    """Where a parked sequence is, by its copies."""
    if not tiers.parked[sequence_id].copies:
        return Phase.WAITING
    return Phase.SWAPPING_OUT if is_being_written(tiers, sequence_id) else Phase.SWAPPED


def _num_kept(sequence: Sequence) -> int:
    """Computed tokens that are of use to it later: the last one's logits are needed to sample the next, unless that
    only awaits a choice."""
    return min(sequence.num_computed, sequence.num_tokens - (not sequence.awaits_choice))


def _pays_to_swap(pool: BlockPool, tiers: Tiers, sequence: Sequence, config: SchedulerConfig) -> bool:
    """Swap or recompute. What others hold too is counted as there: it would be neither moved in nor computed again.

    The way out is not counted: the blocks are free once they are gathered, and the transfer hides behind what the
    beneficiary computes.
    """
    if tiers.are_absent or config.preemption_method == "recompute":
        return False
    if config.preemption_method == "swap":
        return True
    num_own = sum(pool.counts[block_id] == 1 for block_id in sequence.blocks)
    num_tokens = min(num_own * config.block_size, sequence.num_computed)
    return config.swap_us_per_block * num_own < config.recompute_us_per_token * num_tokens


def _swap_out(
    tiers: Tiers, sequence: Sequence, names: tuple[bytes, ...], moves: Moves
) -> tuple[Tiers, tuple[Effect, ...]]:
    effects: list[Effect] = []
    for tier in LOWER_TIERS:
        here = [(index, copy.block_id) for index, copy in moves if copy.tier is tier]
        if here:
            block_ids, its_names = tuple([b for _, b in here]), tuple([names[index] for index, _ in here])
            transfer = Transfer(tier, block_ids, its_names, (sequence.sequence_id,), is_fetch=False)
            tiers, transfer_id = start_transfer(tiers, transfer)
            pairs = tuple([(sequence.blocks[index], block_id) for index, block_id in here])
            effects.append(SwapOut(transfer_id, tier, pairs))
    return tiers, tuple(effects)


def _cancel_fetch(tiers: Tiers, sequence_id: int, parked: Parked) -> tuple[Tiers, tuple[Effect, ...]]:
    """What has come is discarded at once, what is under way when it comes."""
    here = [scatter.transfer_id for scatter in parked.scatters if scatter.transfer_id not in parked.awaited]
    tiers = tiers._replace(
        parked=tiers.parked.set(sequence_id, parked._replace(awaited=(), scatters=())),
        landing=tuple([i for i in tiers.landing if i != sequence_id]),
    )
    return tiers, tuple([Discard(transfer_id) for transfer_id in here])


def _give_up_copies(tiers: Tiers, parked: Parked) -> Tiers:
    return give_copies(tiers, parked.copies, parked.names[: len(parked.copies)])


def _with_parked(tiers: Tiers, sequence: Sequence, parked: Parked) -> Tiers:
    return tiers._replace(parked=tiers.parked.set(sequence.sequence_id, parked))
