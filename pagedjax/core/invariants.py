"""What must hold after every update, whatever the events were. Tests check all of it after each step of a search."""

from collections import Counter

from pagedjax.core.config import num_blocks_for
from pagedjax.core.policy import num_blocks_reserved
from pagedjax.core.state import Phase, State
from pagedjax.core.waiting import in_rank_order


def check(state: State) -> None:
    """Raise AssertionError, naming the broken invariant, if the state is inconsistent."""
    _check_blocks_are_conserved(state)
    _check_prefix_cache(state)
    _check_waiting(state)
    _check_running(state)
    _check_in_flight(state)
    assert num_blocks_reserved(state.running, state.config.block_size) <= state.pool.num_free, "a reservation is broken"


def _check_blocks_are_conserved(state: State) -> None:
    pool = state.pool
    references = Counter(block_id for s in state.running for block_id in s.blocks)
    assert dict(pool.counts.items()) == references, "reference counts differ from the block tables"
    clean, idle = list(pool.clean.values()), [block_id for block_id, _ in pool.idle.values()]
    everywhere = sorted([*pool.counts, *clean, *idle])
    assert everywhere == list(range(pool.num_blocks)), "a block is lost, or in two places"
    assert sorted(pool.clean) == list(range(len(clean))), "the clean stack has a hole"
    assert {b: t for t, (b, _) in pool.idle.items()} == dict(pool.idle_tickets.items()), "idle queue and tickets differ"
    assert all(pool.idle_head <= ticket < pool.idle_tail for ticket in pool.idle), "an idle ticket is out of range"


def _check_prefix_cache(state: State) -> None:
    pool = state.pool
    cached = set(pool.cached.values())
    assert len(cached) == len(pool.cached), "a block is in the prefix cache twice"
    assert all(pool.cached.get(name) == b for b, name in pool.idle.values()), "an idle block is not in the prefix cache"
    assert not any(b in cached for b in pool.clean.values()), "a clean block is in the prefix cache"
    assert len(state.pending) == len(state.in_flight), "blocks are being computed but nothing is in flight"
    for computed in state.pending:
        assert all(b in pool.counts for b in computed.values()), "a block being computed has no owner"
    for sequence in state.running:
        uncomputed = sequence.blocks[sequence.num_computed // state.config.block_size :]
        writable = sequence.blocks[sequence.num_planned // state.config.block_size :]
        assert not any(b in cached for b in uncomputed), "a block is in the prefix cache before it is computed"
        assert all(pool.counts[b] == 1 for b in writable), "a writable block is shared"


def _check_waiting(state: State) -> None:
    waiters = list(in_rank_order(state.waiting))
    assert {s.sequence_id for s in waiters} == set(state.waiting.places), "the waiting index differs from the lines"
    assert [s.rank for s in waiters] == sorted(s.rank for s in waiters), "waiting is out of rank order"
    assert sum(s.num_tokens for s in waiters) == state.waiting.num_tokens, "waiting tokens are miscounted"
    for sequence in waiters:
        assert sequence.phase is Phase.WAITING, "a waiting sequence has another phase"
        assert not sequence.blocks and not sequence.num_in_flight, "a waiting sequence holds blocks or is in a step"
        assert sequence.num_expected == sequence.num_tokens, "a waiting sequence expects a token"


def _check_running(state: State) -> None:
    config = state.config
    if state.config_since == 0:
        assert len(state.running) <= config.max_num_seqs, "too many sequences run"
    ids = [s.sequence_id for s in state.running]
    assert len(set(ids)) == len(ids) and not any(i in state.waiting.places for i in ids), "a sequence is in two places"
    assert [s.rank for s in state.running] == sorted(s.rank for s in state.running), "running is out of rank order"
    for s in state.running:
        assert s.phase is not Phase.RUNNING or s.finish is None, "a running sequence has ended"
        assert s.phase is Phase.RUNNING or s.num_in_flight > 0, "a leaving sequence was not drained"
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
