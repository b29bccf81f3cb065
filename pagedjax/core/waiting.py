"""The waiting line: a first-come-first-served lane for each tenant and priority, of which only the heads are compared.

A preempted sequence keeps its place in its lane. Every operation costs the same for ten waiting sequences and for a
hundred thousand.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Any

from immutables import Map

from pagedjax.core.state import Lane, LaneKey, Queue, Sequence, Waiting


def enqueue(waiting: Waiting, sequence: Sequence) -> Waiting:
    """Put a new arrival at the end of its lane."""
    key = _lane_key(sequence)
    lane = waiting.lanes.get(key, Lane())
    lane = lane._replace(line=lane.line.set(lane.tail, sequence), tail=lane.tail + 1)
    return _with_lane(waiting, sequence, lane, (key, lane.tail - 1))


def park(waiting: Waiting, sequence: Sequence) -> Waiting:
    """Put a sequence that has run before back where its arrival says."""
    key = _lane_key(sequence)
    lane = waiting.lanes.get(key, Lane())
    parked = list(lane.parked)
    insort(parked, sequence, key=_rank)
    return _with_lane(waiting, sequence, lane._replace(parked=tuple(parked)), (key, None))


def find(waiting: Waiting, sequence_id: int) -> Sequence | None:
    place = waiting.places.get(sequence_id)
    if place is None:
        return None
    key, ticket = place
    lane = waiting.lanes[key]
    if ticket is not None:
        return lane.line[ticket]
    return next(sequence for sequence in lane.parked if sequence.sequence_id == sequence_id)


def remove(waiting: Waiting, sequence: Sequence) -> Waiting:
    """Take a waiting sequence out of its lane."""
    key, ticket = waiting.places[sequence.sequence_id]
    lane = waiting.lanes[key]
    if ticket is None:
        lane = lane._replace(parked=tuple(s for s in lane.parked if s is not sequence))
    else:
        line, head = lane.line.delete(ticket), lane.head
        while head < lane.tail and head not in line:
            head += 1
        lane = lane._replace(line=line, head=head)
    empty = not lane.line and not lane.parked
    lanes = waiting.lanes.delete(key) if empty else waiting.lanes.set(key, lane)
    queues = _recount(waiting, sequence, -1)
    return Waiting(lanes, waiting.places.delete(sequence.sequence_id), queues, waiting.num_tokens - sequence.num_tokens)


def in_rank_order(waiting: Waiting, key: Callable[[Sequence], Any] | None = None) -> Iterator[Sequence]:
    """The waiting sequences, smallest `key` first; lazily. Without a key by priority, then arrival.

    Within a lane the order is that of arrival, whatever the key. A key may grow while the iterator is in use, as that
    of a tenant's sequences does when one of them is admitted: it is looked at again before its sequence is given.
    """
    key = key or _rank
    lanes = [lane for one in waiting.lanes.values() for lane in (iter(one.parked), _line(one))]
    heads = [(key(first), index, first) for index, lane in enumerate(lanes) if (first := next(lane, None)) is not None]
    heapify(heads)
    while heads:
        known, index, sequence = heads[0]
        current = key(sequence)
        if current != known:
            heapreplace(heads, (current, index, sequence))
            continue
        yield sequence
        following = next(lanes[index], None)
        if following is None:
            heappop(heads)
        else:
            heapreplace(heads, (key(following), index, following))


def _line(lane: Lane) -> Iterator[Sequence]:
    for ticket in range(lane.head, lane.tail):
        sequence = lane.line.get(ticket)
        if sequence is not None:
            yield sequence


def _with_lane(waiting: Waiting, sequence: Sequence, lane: Lane, place: tuple[LaneKey, int | None]) -> Waiting:
    lanes = waiting.lanes.set(place[0], lane)
    places = waiting.places.set(sequence.sequence_id, place)
    return Waiting(lanes, places, _recount(waiting, sequence, 1), waiting.num_tokens + sequence.num_tokens)


def _recount(waiting: Waiting, sequence: Sequence, sign: int) -> Map[str, Queue]:
    """The tenants' counts with one sequence more or less. A tenant with nobody in line has none."""
    tenant = sequence.request.tenant
    num_requests, num_tokens = waiting.queues.get(tenant, Queue())
    if num_requests + sign == 0:
        return waiting.queues.delete(tenant)
    return waiting.queues.set(tenant, Queue(num_requests + sign, num_tokens + sign * sequence.num_tokens))


def _lane_key(sequence: Sequence) -> LaneKey:
    return sequence.request.tenant, sequence.request.priority


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
