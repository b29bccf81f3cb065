"""The waiting line by itself: order, removal from anywhere, and no cost that grows with its length."""

import random

from pagedjax.core import waiting as lines
from pagedjax.core.phases import Phase
from pagedjax.core.request import Request
from pagedjax.core.state import Sequence, Waiting


def make_sequence(sequence_id, priority=0, arrival_us=None):
    arrival_us = sequence_id if arrival_us is None else arrival_us
    request = Request(sequence_id, 5, 5, priority)
    return Sequence(request, arrival_us, Phase.WAITING, 5, 5, 0, 0, 0, 0, (), ())


def ids(waiting):
    return [s.sequence_id for s in lines.in_rank_order(waiting)]


def line_of(*sequences):
    waiting = Waiting()
    for sequence in sequences:
        waiting = lines.enqueue(waiting, sequence)
    return waiting


def test_the_line_is_in_order_of_priority_then_arrival():
    assert ids(line_of(*(make_sequence(i, priority=-i % 3) for i in range(6)))) == [0, 3, 2, 5, 1, 4]


def test_anyone_can_be_found_and_taken_out():
    waiting = line_of(*map(make_sequence, range(5)))
    for sequence_id in (2, 0, 4):
        waiting = lines.remove(waiting, lines.find(waiting, sequence_id))
    assert ids(waiting) == [1, 3]
    assert (len(waiting), waiting.num_tokens) == (2, 10)
    assert lines.find(waiting, 2) is None


def test_one_that_ran_before_goes_where_its_rank_says():
    waiting = line_of(make_sequence(3), make_sequence(7))
    for sequence_id in (5, 1, 9):
        waiting = lines.park(waiting, make_sequence(sequence_id))
    assert ids(waiting) == [1, 3, 5, 7, 9]
    waiting = lines.remove(waiting, lines.find(waiting, 5))
    assert ids(waiting) == [1, 3, 7, 9]


def test_an_empty_line_leaves_nothing_behind():
    waiting = line_of(make_sequence(1))
    assert lines.remove(waiting, make_sequence(1)) == Waiting()


def test_the_line_agrees_with_a_sorted_list_whatever_happens():
    rng, waiting, model = random.Random(0), Waiting(), []
    for sequence_id in range(400):
        if model and rng.random() < 0.45:
            sequence = model.pop(rng.randrange(len(model)))
            waiting = lines.remove(waiting, sequence)
            if rng.random() < 0.3:
                waiting = lines.park(waiting, sequence)
                model.append(sequence)
        else:
            sequence = make_sequence(sequence_id, rng.randint(-2, 2))
            waiting = lines.enqueue(waiting, sequence)
            model.append(sequence)
        assert list(lines.in_rank_order(waiting)) == sorted(model, key=lambda s: s.rank)
        assert waiting.num_tokens == 5 * len(model)
