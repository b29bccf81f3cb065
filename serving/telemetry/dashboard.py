"""The page at / and the scheduler's state that it draws. Lengths, names and block ids only: no texts, no token ids."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.resources import files
from itertools import islice
from typing import Any

from pagedjax.core.blocks import BlockPool
from pagedjax.core.plan import Tier
from pagedjax.core.state import Sequence, State
from pagedjax.core.tenants import share, weight_in_use
from pagedjax.core.tiers import LOWER_TIERS, pool_of
from pagedjax.core.waiting import in_rank_order
from serving.interfaces import Engine

MAX_LISTED = 128
MAX_TENANTS = 32
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
    """What the page draws of a scheduler state: counts, the first MAX_LISTED sequences of each kind, the latest plan,
    the first MAX_TENANTS tenants, and the memory tiers that there are."""
    return {
        "now_us": state.now_us,
        "num_plans": state.next_plan_id,
        "plan": _plan(state),
        "num_running": len(state.running),
        "num_waiting": len(state.waiting),
        "running": [_sequence(one) for one in state.running[:MAX_LISTED]],
        "waiting": [_sequence(one) for one in islice(in_rank_order(state.waiting), MAX_LISTED)],
        "tenants": tenants(state),
        "tiers": tiers(state),
    }


def tiers(state: State) -> list[dict[str, Any]]:
    """The memories that there are, the device's first."""
    lower = [tier for tier in LOWER_TIERS if pool_of(state.tiers, tier).num_blocks]
    return [_device(state), *(_lower(state, tier) for tier in lower)]


def tenants(state: State) -> list[dict[str, Any]]:
    """The tenants with most service lately: what share of it each has, and what share is fair among those in use.

    Shares are of the last 50,000 to 100,000 service tokens in which the tenant had somebody in line; None before any.
    """
    running = Counter(sequence.request.tenant for sequence in state.running)
    in_use = weight_in_use(state.tenants, state.waiting.queues)
    found: list[dict[str, Any]] = []
    for name, tenant in state.tenants.accounts.items():
        own, total = share(state.tenants, name)
        queue = state.waiting.queues.get(name)
        found.append(
            {
                "name": name,
                "weight": tenant.weight,
                "service": tenant.service,
                "share": own / total if total > 0 else None,
                "fair_share": tenant.weight / in_use if in_use else None,
                "num_running": running[name],
                "num_waiting": queue.num_requests if queue else 0,
            }
        )
    return sorted(found, key=lambda one: (-one["service"], one["name"]))[:MAX_TENANTS]


def num_shown_blocks(num_blocks: int, held: Iterable[int]) -> int:
    """Pools take their lowest blocks first, so of a large one the page shows as many as cover those in use."""
    return min(num_blocks, max(MIN_SHOWN_BLOCKS, 1 << max(held, default=0).bit_length()))


def cells(pool: BlockPool, owners: Mapping[int, int], num_shown: int) -> list[int]:
    """The first `num_shown` blocks one by one, or every k-th where there are more than MAX_CELLS.

    A cell holds what `owners` says of a block with one holder (HELD if nothing), or FREE, IDLE (cached, nobody holds
    it) or SHARED.
    """
    num_cells = min(num_shown, MAX_CELLS)
    return [_cell(pool, cell * num_shown // num_cells, owners) for cell in range(num_cells)]


def _cell(pool: BlockPool, block_id: int, owners: Mapping[int, int]) -> int:
    num_holders = pool.counts.get(block_id, 0)
    if num_holders > 1:
        return SHARED
    if num_holders == 1:
        return owners.get(block_id, HELD)
    return IDLE if block_id in pool.idle_tickets else FREE


def _device(state: State) -> dict[str, Any]:
    owners = {block_id: sequence.sequence_id for sequence in state.running for block_id in sequence.blocks}
    return _tier("device", state.pool, owners)


def _lower(state: State, tier: Tier) -> dict[str, Any]:
    owners = {
        copy.block_id: sequence_id
        for sequence_id, parked in state.tiers.parked.items()
        for copy in parked.copies
        if copy.tier is tier
    }
    return _tier(tier.value, pool_of(state.tiers, tier), owners)


def _tier(name: str, pool: BlockPool, owners: Mapping[int, int]) -> dict[str, Any]:
    num_shown = num_shown_blocks(pool.num_blocks, owners)
    return {
        "name": name,
        "num_blocks": pool.num_blocks,
        "num_held_blocks": len(pool.counts),
        "num_idle_blocks": len(pool.idle),
        "num_shown_blocks": num_shown,
        "cells": cells(pool, owners, num_shown),
    }


def _plan(state: State) -> dict[str, int] | None:
    """The latest plan in flight, if there is one."""
    if not state.in_flight:
        return None
    plan = state.in_flight[-1]
    return {"num_rows": len(plan.rows), "num_tokens": plan.num_tokens}


def _sequence(sequence: Sequence) -> dict[str, Any]:
    """Lengths in tokens."""
    return {
        "id": sequence.sequence_id,
        "tenant": sequence.request.tenant,
        "priority": sequence.request.priority,
        "phase": sequence.phase.value,
        "prompt_len": sequence.request.prompt_len,
        "max_tokens": sequence.request.max_tokens,
        "num_tokens": sequence.num_tokens,
        "num_computed": sequence.num_computed,
        "num_cached": sequence.num_cached,
        "num_blocks": len(sequence.blocks),
    }
