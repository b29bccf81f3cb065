"""What must hold after every update, whatever the events were. Tests check all of it after each step of a search."""

from collections import Counter

from pagedjax.core.blocks import BlockPool
from pagedjax.core.config import num_blocks_for
from pagedjax.core.parking import phase_of
from pagedjax.core.phases import Phase
from pagedjax.core.policy import STAYS, num_blocks_reserved
from pagedjax.core.state import State
from pagedjax.core.tiers import LOWER_TIERS, pool_of
from pagedjax.core.waiting import find, in_rank_order


def check(state: State) -> None:
    """Raise AssertionError, naming the broken invariant, if the state is inconsistent."""
    _check_device_blocks(state)
    _check_lower_tiers(state)
    _check_prefix_cache(state)
    _check_parked(state)
    _check_waiting(state)
    _check_running(state)
    _check_in_flight(state)
    assert num_blocks_reserved(state.running, state.config.block_size) <= state.pool.num_free, "a reservation is broken"


def _check_device_blocks(state: State) -> None:
    references = Counter(block_id for s in state.running for block_id in s.blocks)
    _check_pool(state.pool, references)
    for sequence in state.running:
        writable = sequence.blocks[sequence.num_planned // state.config.block_size :]
        shared = [b for b in writable if state.pool.counts[b] > 1 and b not in state.shared_tails]
        assert not shared, "a writable block is shared"


def _check_lower_tiers(state: State) -> None:
    """Blocks of lower tiers are held by parked sequences and by transfers, and nobody reads what is being written."""
    tiers = state.tiers
    for tier in LOWER_TIERS:
        copies = Counter(c.block_id for parked in tiers.parked.values() for c in parked.copies if c.tier is tier)
        read, written = (
            Counter(
                b for t in tiers.transfers.values() if t.tier is tier and t.is_fetch is is_fetch for b in t.block_ids
            )
            for is_fetch in (True, False)
        )
        _check_pool(pool_of(tiers, tier), copies + read + written)
        assert not read.keys() & written.keys(), "a copy is read before it is there"
        assert all(count == 1 for count in written.values()), "two transfers write one block"


def _check_pool(pool: BlockPool, references: Counter[int]) -> None:
    if not pool.num_blocks:
        assert not references and not pool.cached, "a tier that is absent has blocks"
        return
    assert dict(pool.counts.items()) == references, "reference counts differ from the holders"
    clean, idle = list(pool.clean.values()), [block_id for block_id, _ in pool.idle.values()]
    everywhere = sorted([*pool.counts, *clean, *idle])
    assert everywhere == list(range(pool.num_blocks)), "a block is lost, or in two places"
    assert sorted(pool.clean) == list(range(len(clean))), "the clean stack has a hole"
    assert {b: t for t, (b, _) in pool.idle.items()} == dict(pool.idle_tickets.items()), "idle queue and tickets differ"
    assert all(pool.idle_head <= ticket < pool.idle_tail for ticket in pool.idle), "an idle ticket is out of range"
    cached = set(pool.cached.values())
    assert len(cached) == len(pool.cached), "a block is in the prefix cache twice"
    assert all(pool.cached.get(name) == b for b, name in pool.idle.values()), "an idle block is not in the prefix cache"
    assert not any(b in cached for b in clean), "a clean block is in the prefix cache"


def _check_parked(state: State) -> None:
    """What is parked is in line, or on its way back with its transfers and scatters accounted for."""
    tiers, block_size = state.tiers, state.config.block_size
    running = {s.sequence_id: s for s in state.running}
    for sequence_id, parked in tiers.parked.items():
        if not parked.scatters:
            sequence = find(state.waiting, sequence_id)
            assert sequence is not None, "a parked sequence is not in line"
            assert sequence.phase is phase_of(tiers, sequence_id), "a parked sequence's phase differs from its copies"
            assert not parked.awaited, "a sequence in line awaits a fetch"
            continue
        sequence = running[sequence_id]
        landing = sequence_id in tiers.landing
        assert sequence.phase is (Phase.RUNNING if landing else Phase.FETCHING), "a fetching sequence has another phase"
        assert landing is not bool(parked.awaited), "a sequence lands before its blocks are there"
        assert all(tiers.transfers[i].is_fetch for i in parked.awaited), "a fetch that is awaited is not under way"
        targets = [block_id for scatter in parked.scatters for _, block_id in scatter.pairs]
        assert targets and set(targets) <= set(sequence.blocks), "a fetched block has no place in the table"
        assert sequence.num_in_flight == 0, "a sequence is in a step and in transfer"
    assert all(tiers.parked[i].scatters for i in tiers.landing), "a sequence lands that was not fetched"
    fetching = [s.sequence_id for s in state.running if s.phase is Phase.FETCHING]
    assert all(tiers.parked[i].awaited for i in fetching), "a fetching sequence awaits nothing"
    for name, block_id in state.pool.cached.items():
        assert len(name) == 32 or block_id in state.pool.idle_tickets, "a held block has a private name"
    assert all(num_blocks_for(p.num_computed, block_size) >= len(p.names) for p in tiers.parked.values())


def _check_prefix_cache(state: State) -> None:
    pool = state.pool
    cached = set(pool.cached.values())
    assert len(state.pending) == len(state.in_flight), "blocks are being computed but nothing is in flight"
    for computed in state.pending:
        assert all(b in pool.counts for b in computed.values()), "a block being computed has no owner"
    for sequence in state.running:
        uncomputed = sequence.blocks[sequence.num_computed // state.config.block_size :]
        assert not any(b in cached for b in uncomputed), "a block is in the prefix cache before it is computed"


def _check_waiting(state: State) -> None:
    waiters = list(in_rank_order(state.waiting))
    assert {s.sequence_id for s in waiters} == set(state.waiting.places), "the waiting index differs from the lines"
    assert [s.rank for s in waiters] == sorted(s.rank for s in waiters), "waiting is out of rank order"
    assert sum(s.num_tokens for s in waiters) == state.waiting.num_tokens, "waiting tokens are miscounted"
    for sequence in waiters:
        parked = sequence.sequence_id in state.tiers.parked
        assert parked or sequence.phase is Phase.WAITING, "a sequence that has not run is swapped"
        assert not sequence.blocks and not sequence.num_in_flight, "a waiting sequence holds blocks or is in a step"
        num_expected = sequence.num_tokens + sequence.awaits_choice
        assert sequence.num_expected == num_expected, "a waiting sequence expects a token"


def _check_running(state: State) -> None:
    config = state.config
    if state.config_since == 0:
        assert len(state.running) <= config.max_num_seqs, "too many sequences run"
    ids = [s.sequence_id for s in state.running]
    assert len(set(ids)) == len(ids) and not any(i in state.waiting.places for i in ids), "a sequence is in two places"
    assert [s.rank for s in state.running] == sorted(s.rank for s in state.running), "running is out of rank order"
    for s in state.running:
        assert s.phase is not Phase.RUNNING or s.finish is None, "a running sequence has ended"
        assert s.phase in STAYS or s.num_in_flight > 0, "a leaving sequence was not drained"
        assert s.num_computed > 0 or s.num_in_flight > 0, "a running sequence was never planned"
        assert s.num_computed <= s.num_planned <= s.num_expected, "counts are out of order"
        assert len(s.blocks) == num_blocks_for(s.num_planned, config.block_size), "table and context differ in length"
        assert s.num_tokens <= s.request.prompt_len + s.request.max_tokens, "a sequence has too many tokens"


def _check_in_flight(state: State) -> None:
    config = state.config
    assert len(state.in_flight) <= 2, "too many steps are in flight"
    counts = Counter(row.sequence_id for plan in state.in_flight for row in plan.rows)
    assert {s.sequence_id: s.num_in_flight for s in state.running if s.num_in_flight} == counts, "in-flight miscount"
    for plan in state.in_flight:
        lengths = [row.length for row in plan.rows]
        assert lengths and min(lengths) > 0, "a step has nothing to compute"
        if plan.plan_id >= state.config_since:
            assert sum(lengths) <= config.max_num_batched_tokens, "a step has too many tokens"
            assert len(lengths) <= config.max_num_seqs, "a step has too many rows"
        decodes = sum(1 for length in lengths if length == 1)
        assert all(length == 1 for length in lengths[:decodes]), "decode rows do not come first"
        for row in plan.rows:
            assert len(row.blocks) == num_blocks_for(row.start + row.length, config.block_size), "a row's table is off"
