"""Transfers that end: copies that have arrived in their tier, fetched blocks that have arrived in their staging.

A failed one costs a sequence what it would have brought, and nothing else: behind the longest prefix that is still
there it computes its tokens again.
"""

from pagedjax.core.blocks import forget
from pagedjax.core.effects import Discard, Effect
from pagedjax.core.errors import SchedulerError
from pagedjax.core.events import TransferDone
from pagedjax.core.leaving import drain, settle
from pagedjax.core.phases import Cause, next_phase
from pagedjax.core.state import State
from pagedjax.core.tiers import Copy, Parked, Tiers, Transfer, end_transfer, give_copies, pool_of, with_pool


def transfer_done(state: State, event: TransferDone) -> tuple[State, tuple[Effect, ...]]:
    transfer = state.tiers.transfers.get(event.transfer_id)
    if transfer is None:
        raise SchedulerError(f"transfer {event.transfer_id} is not under way")
    if not event.ok:
        return _failed(state, event.transfer_id, transfer)
    state = state._replace(tiers=end_transfer(state.tiers, event.transfer_id))
    if transfer.is_fetch:
        return _fetched(state, event.transfer_id, transfer)
    for sequence_id in transfer.sequence_ids:
        state = settle(state, sequence_id)
    return state, ()


def _fetched(state: State, transfer_id: int, transfer: Transfer) -> tuple[State, tuple[Effect, ...]]:
    """The blocks are in their staging: with the last of its fetches the sequence runs, and the next plan scatters."""
    (sequence_id,) = transfer.sequence_ids
    parked = state.tiers.parked.get(sequence_id)
    if parked is None or transfer_id not in parked.awaited:
        return state, (Discard(transfer_id),)
    parked = parked._replace(awaited=tuple([i for i in parked.awaited if i != transfer_id]))
    tiers = state.tiers._replace(parked=state.tiers.parked.set(sequence_id, parked))
    if parked.awaited:
        return state._replace(tiers=tiers), ()
    tiers = tiers._replace(landing=(*tiers.landing, sequence_id))
    return _with_phase(state, sequence_id, Cause.LAND)._replace(tiers=tiers), ()


def _failed(state: State, transfer_id: int, transfer: Transfer) -> tuple[State, tuple[Effect, ...]]:
    """Its copies cannot be read: whoever holds one of them gives it up, and those of the blocks behind it."""
    tiers, tier = state.tiers, transfer.tier
    cached = pool_of(tiers, tier).cached
    unreadable = [name for name, block_id in zip(transfer.names, transfer.block_ids) if cached.get(name) == block_id]
    tiers = with_pool(tiers, tier, forget(pool_of(tiers, tier), unreadable))
    lost = {Copy(tier, block_id) for block_id in transfer.block_ids}
    losers = [i for i, parked in sorted(tiers.parked.items()) if not lost.isdisjoint(parked.copies)]
    for sequence_id in losers:
        tiers = _give_up_lost(tiers, sequence_id, tiers.parked[sequence_id], lost)
    state = state._replace(tiers=end_transfer(tiers, transfer_id))
    for sequence_id in (*losers, *transfer.sequence_ids):
        state = settle(state, sequence_id)
    if not transfer.is_fetch:
        return state, ()
    (sequence_id,) = transfer.sequence_ids
    parked_one = state.tiers.parked.get(sequence_id)
    if parked_one is None or transfer_id not in parked_one.awaited:
        return state, ()
    return drain(_with_phase(state, sequence_id, Cause.LOSE))


def _give_up_lost(tiers: Tiers, sequence_id: int, parked: Parked, lost: set[Copy]) -> Tiers:
    end = next(index for index, copy in enumerate(parked.copies) if copy in lost)
    tiers = give_copies(tiers, parked.copies[end:], parked.names[end : len(parked.copies)])
    return tiers._replace(parked=tiers.parked.set(sequence_id, parked._replace(copies=parked.copies[:end])))


def _with_phase(state: State, sequence_id: int, cause: Cause) -> State:
    running = list(state.running)
    for index, sequence in enumerate(running):
        if sequence.sequence_id == sequence_id:
            stay = sequence.stay._replace(reason="failure") if cause is Cause.LOSE else sequence.stay
            running[index] = sequence._replace(phase=next_phase(sequence.phase, cause), stay=stay)
    return state._replace(running=tuple(running))
