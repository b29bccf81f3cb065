"""The page at / and the scheduler's state that it draws. Lengths and block ids only: no texts, no token ids."""

import time
from collections.abc import Mapping
from importlib.resources import files
from itertools import islice
from typing import Any

from pagedjax.core.blocks import BlockPool
from pagedjax.core.state import Sequence, State
from pagedjax.core.waiting import in_rank_order
from serving.interfaces import Engine

MAX_LISTED = 128
MAX_CELLS = 1024
MIN_SHOWN_BLOCKS = 512
FREE, IDLE, SHARED, HELD = -1, -2, -3, -4
MAX_AGE_S = 0.25
# One page from one origin: nothing else may be loaded or contacted, whatever ends up in the page.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


def page(name: str = "index.html") -> bytes:
    return files("serving").joinpath("static", name).read_bytes()


class Snapshots:
    """Pictures of the state, at most one per MAX_AGE_S however many pages watch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._taken_s = float("-inf")
        self._latest: dict[str, Any] = {}

    async def latest(self) -> dict[str, Any]:
        now_s = time.monotonic()
        if now_s - self._taken_s > MAX_AGE_S:
            # Whoever asks meanwhile gets the one before, if there is one.
            self._taken_s = now_s
            self._latest = await self._engine.ask(picture)
        return self._latest or await self._engine.ask(picture)


def picture(state: State) -> dict[str, Any]:
    """What the page draws of a scheduler state: counts, the first MAX_LISTED sequences of each kind, and cells."""
    pool = state.pool
    return {
        "num_running": len(state.running),
        "num_waiting": len(state.waiting),
        "running": [_sequence(one) for one in state.running[:MAX_LISTED]],
        "waiting": [_sequence(one) for one in islice(in_rank_order(state.waiting), MAX_LISTED)],
        "num_blocks": pool.num_blocks,
        "num_held_blocks": len(pool.counts),
        "num_idle_blocks": len(pool.idle),
        "num_shown_blocks": num_shown_blocks(state),
        "cells": cells(state),
    }


def num_shown_blocks(state: State) -> int:
    """Pools take their lowest blocks first, so of a large one the page shows as many as cover those in use."""
    highest = max((max(sequence.blocks, default=0) for sequence in state.running), default=0)
    return min(state.pool.num_blocks, max(MIN_SHOWN_BLOCKS, 1 << highest.bit_length()))


def cells(state: State) -> list[int]:
    """The shown blocks one by one, or every k-th where there are more than MAX_CELLS.

    A cell holds the position in `running` of the block's owner, or FREE, IDLE (cached, nobody holds it), SHARED, or
    HELD (by a sequence that is not running).
    """
    pool = state.pool
    num_shown = num_shown_blocks(state)
    num_cells = min(num_shown, MAX_CELLS)
    shown = [cell * num_shown // num_cells for cell in range(num_cells)]
    wanted = set(shown)
    owners = {
        block_id: position
        for position, sequence in enumerate(state.running)
        for block_id in sequence.blocks
        if block_id in wanted
    }
    return [_cell(pool, block_id, owners) for block_id in shown]


def _cell(pool: BlockPool, block_id: int, owners: Mapping[int, int]) -> int:
    num_holders = pool.counts.get(block_id, 0)
    if num_holders > 1:
        return SHARED
    if num_holders == 1:
        return owners.get(block_id, HELD)
    return IDLE if block_id in pool.idle_tickets else FREE


def _sequence(sequence: Sequence) -> dict[str, Any]:
    """Lengths in tokens."""
    return {
        "id": sequence.sequence_id,
        "priority": sequence.request.priority,
        "phase": sequence.phase.value,
        "prompt_len": sequence.request.prompt_len,
        "max_tokens": sequence.request.max_tokens,
        "num_tokens": sequence.num_tokens,
        "num_computed": sequence.num_computed,
        "num_cached": sequence.num_cached,
        "num_blocks": len(sequence.blocks),
    }
