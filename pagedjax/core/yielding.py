"""Preemption by rank: running sequences that must yield to one in line, before the step is planned.

A sequence in line preempts running ones of a worse grade (its tenant is owed, it is aged, its priority is higher) if
no slot or too few blocks are free or on their way, or if their prompts would take all tokens of the step; never one of
an equal grade, so nobody is preempted to and fro. A sequence is shielded by having run for a short while only, and none
yields whose tenant is owed. Nobody yields in vain: if all who may would not make enough room, none does.
"""

from collections import Counter
from typing import NamedTuple

from pagedjax.core import waiting as lines
from pagedjax.core.blocks import BlockPool
from pagedjax.core.effects import Effect
from pagedjax.core.leaving import drain
from pagedjax.core.phases import Cause, Phase, next_phase
from pagedjax.core.policy import (
    STAYS,
    Grade,
    Order,
    excess_blocks,
    given_up,
    num_blocks_coming,
    num_blocks_growing,
    num_blocks_promised,
    num_blocks_to_admit,
    num_to_compute,
    waited_us,
)
from pagedjax.core.prefix import longest_prefix, max_prefix_blocks
from pagedjax.core.request import MIN_PRIORITY
from pagedjax.core.state import Sequence, State

_REASONS = ("fairness", "ageing", "priority")


def make_way(state: State, order: Order) -> tuple[State, tuple[Effect, ...]]:
    """Mark those who must yield, because more run than may, or somebody of a better grade waits. Those that are in no
    step in flight leave at once."""
    running = list(state.running)
    if len(running) > state.config.max_num_seqs:
        running = _without_excess(running, order)
    if running and state.waiting.places and state.config.enable_preemption:
        running = _with_way_made(state, order, running)
    if running == list(state.running):
        return state, ()
    return drain(state._replace(running=tuple(running)))


def is_shielded(sequence: Sequence, order: Order) -> bool:
    """Whether what it has had since it last came to run is too little to be taken away again.

    It must have run for a time slice, computed a chunk, and got beyond where it was when it was last preempted: so
    there is progress however often sequences are preempted.
    """
    config, stay = order.config, sequence.stay
    return (
        order.now_us - stay.since_us < config.time_slice_us
        or sequence.num_planned - sequence.num_cached < config.min_execution_chunk
        or 0 < stay.num_served >= sequence.num_planned
    )


class _Room(NamedTuple):
    """What those who run leave: slots, blocks that nobody is promised, and tokens of the step (all may be negative).

    Blocks on their way back count: `given` says how many references to each the leaving ones hold, and grows.
    """

    num_slots: int
    num_blocks: int
    num_tokens: int
    given: Counter[int]


def _with_way_made(state: State, order: Order, running: list[Sequence]) -> list[Sequence]:
    worst = _worst_grade(running, order)
    room: _Room | None = None
    candidates: list[int] | None = None
    for waiter in lines.in_rank_order(state.waiting, order.in_line):
        if waiter.awaits_choice:
            continue
        grade = order.grade_in_line(waiter)
        if grade >= worst or not _may_preempt(waiter, grade, order):
            break
        if room is None:  # the first that comes so far; in most steps none does
            room = _room(state, order, running)
        num_needed = _num_needed(state, waiter, order)
        if _is_short(room, num_needed + num_blocks_growing(waiter, running, order)):
            candidates = _candidates(running, order, grade) if candidates is None else candidates
            room, victims = _victims(state, order, running, candidates, waiter, room, num_needed)
            if victims is None:
                break
            for index in victims:
                running[index] = yields(running[index], _reason(grade, order.grade(running[index])))
        room = room._replace(num_slots=room.num_slots - 1, num_blocks=room.num_blocks - num_needed)
    return running


def _worst_grade(running: list[Sequence], order: Order) -> Grade:
    """None of those who run is of a worse grade. Cheap, as it is all that most steps need to know."""
    not_aged = any(s.stay.waited_us < order.max_wait_us for s in running)
    return True, not_aged, running[-1].request.priority if not_aged else MIN_PRIORITY


def _candidates(running: list[Sequence], order: Order, best: Grade) -> list[int]:
    """Who may have to yield to somebody of the grade `best`, the first to go first: by index."""
    may_yield = [
        index
        for index, s in enumerate(running)
        if s.phase is Phase.RUNNING and not s.stay.reserved and order.grade(s) > best and not is_shielded(s, order)
    ]
    may_yield = [index for index in may_yield if not order.protects(running[index].request.tenant)]
    may_yield.sort(key=lambda index: order.running(running[index]), reverse=True)
    excess = excess_blocks(running, order) if may_yield else {}
    greedy = []
    for index in may_yield:
        sequence = running[index]
        if excess.get(sequence.request.tenant, 0) > 0:
            excess[sequence.request.tenant] -= len(sequence.blocks)
            greedy.append(index)
    return [*greedy, *(index for index in may_yield if index not in greedy)]


def _victims(
    state: State,
    order: Order,
    running: list[Sequence],
    candidates: list[int],
    waiter: Sequence,
    room: _Room,
    num_needed: int,
) -> tuple[_Room, list[int] | None]:
    """Who must yield so that one sequence more gets a slot, its blocks and a token, and the room that they make; None
    if all who may are too few. They are `candidates` no more.

    Where tokens are short only those yield that have a prompt to compute: another's single one is no help.
    """
    trial, victims, grade = list(running), list[int](), order.grade_in_line(waiter)
    while _is_short(room, num_needed + num_blocks_growing(waiter, trial, order)):
        able = (i for i in candidates if order.grade(running[i]) > grade)
        index = next((i for i in able if room.num_tokens > 0 or num_to_compute(running[i]) > 1), None)
        if index is None:
            return room, None
        candidates.remove(index)
        victims.append(index)
        room = _without(room, running[index], state.pool)
        trial[index] = yields(trial[index], "priority")
    return room, victims


def _is_short(room: _Room, num_blocks: int) -> bool:
    """Whether a slot, a token or one of so many blocks is missing."""
    return room.num_slots < 1 or room.num_tokens < 1 or room.num_blocks < num_blocks


def _room(state: State, order: Order, running: list[Sequence]) -> _Room:
    config, given = order.config, given_up(running)
    num_blocks = state.pool.num_free + num_blocks_coming(given, state.pool)
    return _Room(
        max(0, config.max_num_seqs - sum(s.phase in STAYS for s in running)),
        num_blocks - num_blocks_promised(running, order),
        config.max_num_batched_tokens - sum(map(num_to_compute, running)),
        given,
    )


def _without(room: _Room, victim: Sequence, pool: BlockPool) -> _Room:
    """The room once this one has left too: the blocks whose last holder it is are free then."""
    num_slots, num_blocks, num_tokens, given = room
    given.update(victim.blocks)
    num_gained = sum(given[block_id] == pool.counts[block_id] for block_id in victim.blocks)
    return _Room(num_slots + 1, num_blocks + num_gained, num_tokens + num_to_compute(victim), given)


def _num_needed(state: State, waiter: Sequence, order: Order) -> int:
    """Free blocks that it takes to admit a sequence: not those of a cached prefix that somebody holds."""
    names = waiter.block_hashes[: max_prefix_blocks(waiter.num_tokens, state.config.block_size)]
    prefix = longest_prefix(state.pool, state.pending, names)
    return num_blocks_to_admit(waiter, order) - sum([block_id in state.pool.counts for block_id in prefix])


def _may_preempt(waiter: Sequence, grade: Grade, order: Order) -> bool:
    """In conservative mode only who is owed, aged or has waited a time slice."""
    if order.config.preemption_mode == "aggressive":
        return True
    not_protected, not_aged, _ = grade
    return not not_protected or not not_aged or waited_us(waiter, order.now_us) >= order.config.time_slice_us


def _without_excess(running: list[Sequence], order: Order) -> list[Sequence]:
    """Fewer may run than do, since the configuration has changed: the lowest ranks yield.

    The top does only if all others that would have to are reserved: it could wait for their blocks, and they for its
    row, for ever.
    """
    by_rank = [index for index, s in enumerate(running) if s.phase in STAYS]
    by_rank.sort(key=lambda index: order.running(running[index]))
    may_yield = [index for index in by_rank if not running[index].stay.reserved]
    for index in may_yield[::-1][: max(0, len(by_rank) - order.config.max_num_seqs)]:
        running[index] = yields(running[index], "slots")
    return running


def yields(sequence: Sequence, reason: str) -> Sequence:
    phase = next_phase(sequence.phase, Cause.PREEMPT)
    return sequence._replace(phase=phase, stay=sequence.stay._replace(reason=reason))


def _reason(winner: Grade, loser: Grade) -> str:
    """What the winner has over the loser: the first of the grades' parts that differ."""
    return next(reason for reason, a, b in zip(_REASONS, winner, loser) if a != b)
