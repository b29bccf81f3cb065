"""The persistent table against a dictionary."""

import pickle
import random

import pytest

from pagedjax.core.table import PAGE_SIZE, Table, pop_first, table_of


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


def test_a_table_that_nothing_was_done_to_is_the_same_object():
    table = table_of(range(40))
    assert table.mutate().finish() is table


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
    with pytest.raises(KeyError):
        pop_first(table, 0, 4)


def test_the_first_values_leave_in_order_across_holes_and_pages():
    rng = random.Random(1)
    for _ in range(100):
        keys = sorted(rng.sample(range(6 * PAGE_SIZE), rng.randint(1, 90)))
        mutation = Table[int]().mutate()
        for key in keys:
            mutation[key] = key + 1
        start, taken = rng.randint(0, keys[0]), rng.randint(0, len(keys))
        table, values, next_start = pop_first(mutation.finish(), start, taken)
        assert values == [key + 1 for key in keys[:taken]]
        assert dict(table) == {key: key + 1 for key in keys[taken:]}
        assert all(key >= next_start for key in table)


def test_many_keys_change_as_one_by_one():
    rng, table = random.Random(2), table_of(range(3 * PAGE_SIZE))
    set_keys, discarded = (rng.choices(range(5 * PAGE_SIZE), k=40) for _ in range(2))
    mutation = table.mutate()
    mutation.set_all(set_keys, -1)
    mutation.discard_all(discarded)
    model = dict(table) | dict.fromkeys(set_keys, -1)
    assert dict(mutation.finish()) == {key: value for key, value in model.items() if key not in discarded}
    assert len(mutation) == len(mutation.finish())
