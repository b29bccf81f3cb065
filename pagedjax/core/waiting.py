"""The waiting line: first come, first served within a priority; a preempted sequence keeps its place.

Every operation costs the same for ten waiting sequences and for a hundred thousand.
"""

from bisect import insort
from collections.abc import Iterator

from immutables import Map

from pagedjax.core.state import Lane, Sequence, Waiting


def enqueue(waiting: Waiting, sequence: Sequence) -> Waiting:
    """Put a new arrival at the end of its line."""
    priority = sequence.request.priority
    lane = waiting.lanes.get(priority, Lane())
    lane = lane._replace(line=lane.line.set(lane.tail, sequence), tail=lane.tail + 1)
    return _with_lane(waiting, sequence, lane, (priority, lane.tail - 1))


def park(waiting: Waiting, sequence: Sequence) -> Waiting:
    """Put a sequence that has run before back where its rank says."""
    priority = sequence.request.priority
    lane = waiting.lanes.get(priority, Lane())
    parked = list(lane.parked)
    insort(parked, sequence, key=_rank)
    return _with_lane(waiting, sequence, lane._replace(parked=tuple(parked)), (priority, None))


def find(waiting: Waiting, sequence_id: int) -> Sequence | None:
    place = waiting.places.get(sequence_id)
    if place is None:
        return None
    priority, ticket = place
    lane = waiting.lanes[priority]
    if ticket is not None:
        return lane.line[ticket]
    return next(sequence for sequence in lane.parked if sequence.sequence_id == sequence_id)


def remove(waiting: Waiting, sequence: Sequence) -> Waiting:
    """Take a waiting sequence out of its line."""
    priority, ticket = waiting.places[sequence.sequence_id]
    lane = waiting.lanes[priority]
    if ticket is None:
        lane = lane._replace(parked=tuple(s for s in lane.parked if s is not sequence))
    else:
        line, head = lane.line.delete(ticket), lane.head
        while head < lane.tail and head not in line:
            head += 1
        lane = lane._replace(line=line, head=head)
    empty = not lane.line and not lane.parked
    lanes = waiting.lanes.delete(priority) if empty else waiting.lanes.set(priority, lane)
    places = waiting.places.delete(sequence.sequence_id)
    return Waiting(lanes, places, waiting.num_tokens - sequence.num_tokens)


def in_rank_order(waiting: Waiting) -> Iterator[Sequence]:
    """The waiting sequences, first in line first; lazily."""
    for priority in sorted(waiting.lanes):
        yield from _merge(waiting.lanes[priority])


def _merge(lane: Lane) -> Iterator[Sequence]:
    parked, index = lane.parked, 0
    for sequence in _line(lane.line, lane.head, lane.tail):
        while index < len(parked) and parked[index].rank < sequence.rank:
            yield parked[index]
            index += 1
        yield sequence
    yield from parked[index:]


def _line(line: Map[int, Sequence], head: int, tail: int) -> Iterator[Sequence]:
    for ticket in range(head, tail):
        sequence = line.get(ticket)
        if sequence is not None:
            yield sequence


def _with_lane(waiting: Waiting, sequence: Sequence, lane: Lane, place: tuple[int, int | None]) -> Waiting:
    lanes = waiting.lanes.set(sequence.request.priority, lane)
    places = waiting.places.set(sequence.sequence_id, place)
    return Waiting(lanes, places, waiting.num_tokens + sequence.num_tokens)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
