"""The persistent table against a dictionary."""

import pickle
import random

import pytest

from pagedjax.core.table import PAGE_SIZE, Table, table_of


def test_a_table_agrees_with_a_dictionary_whatever_happens():
    rng, table, model = random.Random(0), Table(), {}
    for _ in range(300):
        mutation = table.mutate()
        for key in rng.sample(range(4 * PAGE_SIZE), 12):
            if rng.random() < 0.5:
                mutation[key] = model[key] = rng.randrange(100)
            else:
                assert mutation.get(key) == model.get(key)
                assert mutation.discard(key) == model.pop(key, None)
        assert len(mutation) == len(model)
        table = mutation.finish()
        assert dict(table) == model
        assert all((key in table) == (key in model) for key in range(5 * PAGE_SIZE))


def test_changes_leave_the_old_table_as_it_was():
    old = table_of(range(100))
    mutation = old.mutate()
    mutation.pop(3)
    mutation[200] = 7
    new = mutation.finish()
    assert list(old) == sorted(old) == list(range(100))
    assert (len(new), new.get(3), new[200]) == (100, None, 7)


def test_equal_contents_are_equal_however_they_came_about():
    mutation = table_of(range(100)).mutate()
    for key in range(100):
        mutation.pop(key)
    empty = mutation.finish()
    assert empty == Table()
    assert hash(empty) == hash(Table())
    assert pickle.loads(pickle.dumps(table_of("abc"))) == table_of("abc")


def test_what_is_not_there_cannot_be_taken_out():
    table = table_of(range(3))
    with pytest.raises(KeyError):
        table.mutate().pop(3)
    with pytest.raises(KeyError):
        table[100]
    assert table.get(100) is None
