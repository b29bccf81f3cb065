"""Forks: sequences that hold blocks in common until one of them writes (copy on write).

Full blocks are never written. The partial one behind them, the *tail*, is shared too; whoever writes it while others
hold it gets a copy first, and the last one writes in place. So n samples of one prompt of P tokens with O tokens each
hold floor(P / B) + n * (ceil((P + O) / B) - floor(P / B)) blocks of B tokens at the end. After vLLM (SOSP'23, 4.4).
"""

from pagedjax.core.blocks import BlockPool, give, share
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Effect
from pagedjax.core.errors import SchedulerError
from pagedjax.core.leaving import drain
from pagedjax.core.phases import Phase
from pagedjax.core.plan import Fork, Row, RowResult, StepPlan
from pagedjax.core.prefix import check_names
from pagedjax.core.resuming import Start
from pagedjax.core.state import Sequence, State
from pagedjax.core.yielding import yields


def add_children(
    state: State, plan: StepPlan, results: tuple[RowResult, ...], choices: tuple[RowResult, ...] = ()
) -> State:
    """Let the forks that a finished plan asks for, or a choice, run beside their parents, or in their place."""
    running = {s.sequence_id: s for s in state.running}
    pool, shared_tails = state.pool, state.shared_tails
    unfinished = [row.sequence_id for row, result in zip(plan.rows, results) if result.children and not row.samples]
    if unfinished:
        raise SchedulerError(f"sequences {unfinished} cannot fork: these rows are not their last")
    for result in results + choices:
        for fork in result.children if result.sequence_id in running else ():
            if fork.sequence_id in running or fork.sequence_id in state.waiting.places:
                raise SchedulerError(f"sequence {fork.sequence_id} is here already")
            parent = running[result.sequence_id]
            child = running[fork.sequence_id] = child_of(parent, fork, state.config)
            pool = share(pool, child.blocks)
            # Room for the copies that come of it was never reserved.
            running[result.sequence_id] = parent._replace(stay=parent.stay._replace(reserved=False))
            if child.num_computed % state.config.block_size:
                shared_tails |= {child.blocks[-1]}
    in_rank_order = tuple(sorted(running.values(), key=lambda s: s.rank))
    return state._replace(running=in_rank_order, pool=pool, shared_tails=shared_tails)


def leave_for_slots(state: State, results: tuple[RowResult, ...]) -> tuple[State, tuple[Effect, ...]]:
    """The lowest-ranked of the new forks get in line if there are not slots for all."""
    excess = len(state.running) - state.config.max_num_seqs
    if excess <= 0:
        return state, ()
    children = {fork.sequence_id for result in results for fork in result.children}
    running = list(state.running)
    for index in range(len(running) - 1, -1, -1):
        if excess > 0 and running[index].sequence_id in children and running[index].phase is Phase.RUNNING:
            running[index] = yields(running[index], "slots")
            excess -= 1
    return drain(state._replace(running=tuple(running)))


def writes_shared_tail(sequence: Sequence, pool: BlockPool, shared_tails: frozenset[int], block_size: int) -> bool:
    """Whether the next token of a sequence goes to a block that others hold too."""
    if sequence.num_planned % block_size == 0 or sequence.blocks[-1] not in shared_tails:
        return False
    return pool.counts[sequence.blocks[-1]] > 1


def with_own_tail(pool: BlockPool, sequence: Sequence, block_id: int) -> tuple[BlockPool, Sequence, tuple[int, int]]:
    """The sequence with `block_id` in place of its tail, and the copy (source, target) that this takes."""
    tail = sequence.blocks[-1]
    return give(pool, (tail,), ()), sequence._replace(blocks=(*sequence.blocks[:-1], block_id)), (tail, block_id)


def parent_of(sequence: Sequence, running: list[Sequence]) -> Sequence | None:
    """The running sequence with the same prompt whose blocks a waiting one can share. All who hold a block must know it
    by the same name, or all by none."""
    fork_of, num_tokens = sequence.request.fork_of, sequence.num_tokens
    parent = next((s for s in running if s.sequence_id == fork_of and s.phase is Phase.RUNNING), None)
    if parent is None:
        # It may be gone, while another of its forks has the whole prompt too.
        siblings = (s for s in running if s.request.fork_of == fork_of and s.phase is Phase.RUNNING)
        parent = next((s for s in siblings if s.num_planned >= num_tokens), None)
    if parent is None:
        return None
    names = parent.block_hashes[: len(sequence.block_hashes)]
    same_names = names == sequence.block_hashes and bool(names) is bool(parent.block_hashes)
    return parent if same_names else None


def awaits_parent(state: State, sequence: Sequence, parent: Sequence | None, rows: tuple[Row, ...]) -> bool:
    """Whether the prompt is yet to be computed, or is by `rows`, those of the very step that is being planned."""
    if parent is None:
        fork_of = sequence.request.fork_of
        return fork_of in state.waiting.places and fork_of not in state.tiers.parked
    for row in rows:
        if row.sequence_id == parent.sequence_id:
            return row.start < sequence.num_tokens
    return parent.num_planned < sequence.num_tokens or parent.sequence_id in state.tiers.landing


def start_of_fork(parent: Sequence, block_size: int, is_reserved: bool) -> Start:
    """All of the prompt is there; the last token is only run again, for its logits, and writes nothing.

    A tail that the parent has filled up is its own, though: the prefix cache may give it to others. Nor is a tail
    shared where room is reserved, since a copy of it would need more.
    """
    num_full, num_more = divmod(parent.request.prompt_len, block_size)
    is_filled = parent.num_planned >= (num_full + 1) * block_size
    if num_more and (is_filled or is_reserved or parent.stay.reserved):
        return Start(parent.blocks[:num_full], num_full * block_size)
    blocks = parent.blocks[: num_full + bool(num_more)]
    shared_tail = frozenset(blocks[-1:] if num_more else ())
    return Start(blocks, parent.request.prompt_len - 1, writes=False, shared_tail=shared_tail)


def child_of(parent: Sequence, fork: Fork, config: SchedulerConfig) -> Sequence:
    """A sequence beside its parent, with its blocks, and with a last token of its own."""
    if parent.phase is Phase.ABORTING or parent.num_in_flight:
        raise SchedulerError(f"sequence {parent.sequence_id} cannot fork: it has ended, or this row is not its last")
    num_tokens = parent.num_expected
    request = parent.request._replace(sequence_id=fork.sequence_id, fork_of=None)
    if num_tokens - request.prompt_len >= request.max_tokens:
        raise SchedulerError(f"sequence {fork.sequence_id} has all its tokens when it is forked")
    names = parent.block_hashes[: (num_tokens - 1) // config.block_size]
    names += fork.block_hashes if parent.stay.named else ()
    check_names(fork.sequence_id, names, num_tokens, config.block_size)
    return parent._replace(
        request=request,
        phase=Phase.YIELDING if parent.phase is Phase.YIELDING else Phase.RUNNING,
        num_tokens=num_tokens,
        num_expected=num_tokens,
        block_hashes=names,
        finish=None,
        stay=parent.stay._replace(reserved=False),
    )
