"""A persistent map from integers that come in runs: block ids, tickets, places in a stack.

`immutables.Map` scatters neighbouring integers over all its nodes: a thousand keys in a row copy a thousand nodes and
touch the reference counts of thirty thousand others (measured at 100,000 keys: 2 us a key and more, most of it waiting
for memory). Here 32 neighbours share a page, which is a tuple, and a Map finds the pages: 0.3 us a key of a run.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from immutables import Map

V = TypeVar("V")
PAGE_SIZE = 32


@dataclass(frozen=True, slots=True)
class Table(Mapping[int, V]):
    """`pages` holds PAGE_SIZE values each, None where there is none; a page with no value at all is left out.

    Change it by `mutate()`, like an `immutables.Map`.
    """

    pages: Map[int, tuple[V | None, ...]] = Map()
    num_values: int = 0

    def __len__(self) -> int:
        return self.num_values

    def __iter__(self) -> Iterator[int]:
        for number, page in self.pages.items():
            yield from (number * PAGE_SIZE + i for i, value in enumerate(page) if value is not None)

    def __getitem__(self, key: int) -> V:
        page = self.pages.get(key // PAGE_SIZE, _EMPTY)
        value = page[key % PAGE_SIZE]
        if value is None:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and self.pages.get(key // PAGE_SIZE, _EMPTY)[key % PAGE_SIZE] is not None

    def mutate(self) -> "Mutation[V]":
        return Mutation(self)


class Mutation(Generic[V]):
    """Changes that become a new Table by `finish`. Lives inside one function."""

    __slots__ = ("_num_values", "_open", "_pages", "_table")

    def __init__(self, table: Table[V]) -> None:
        self._table = table
        self._pages = table.pages
        self._num_values = table.num_values
        self._open: dict[int, list[V | None]] = {}

    def __len__(self) -> int:
        return self._num_values

    def get(self, key: int) -> V | None:
        return self._page(key)[key % PAGE_SIZE]

    def pop(self, key: int) -> V:
        """The value, which is taken out. Raises KeyError if there is none."""
        value = self.discard(key)
        if value is None:
            raise KeyError(key)
        return value

    def discard(self, key: int) -> V | None:
        """The value, which is taken out, or None if there is none."""
        page, place = self._page(key), key % PAGE_SIZE
        value = page[place]
        if value is not None:
            page[place] = None
            self._num_values -= 1
        return value

    def __setitem__(self, key: int, value: V) -> None:
        page, place = self._page(key), key % PAGE_SIZE
        if page[place] is None:
            self._num_values += 1
        page[place] = value

    def set_all(self, keys: Iterable[int], value: V) -> None:
        """Like `self[key] = value` for each key, at half the time."""
        opened, open_page = self._open, self._page
        for key in keys:
            page = opened.get(key // PAGE_SIZE)
            if page is None:
                page = open_page(key)
            place = key % PAGE_SIZE
            if page[place] is None:
                self._num_values += 1
            page[place] = value

    def discard_all(self, keys: Iterable[int]) -> None:
        """Like `discard` for each key, at half the time."""
        opened, open_page = self._open, self._page
        for key in keys:
            page = opened.get(key // PAGE_SIZE)
            if page is None:
                page = open_page(key)
            place = key % PAGE_SIZE
            if page[place] is not None:
                page[place] = None
                self._num_values -= 1

    def finish(self) -> Table[V]:
        if not self._open:
            return self._table
        pages = self._pages.mutate()
        for number, page in self._open.items():
            if page.count(None) < PAGE_SIZE:
                pages[number] = tuple(page)
            else:
                pages.pop(number, None)
        return Table(pages.finish(), self._num_values)

    def _page(self, key: int) -> list[V | None]:
        number = key // PAGE_SIZE
        page = self._open.get(number)
        if page is None:
            page = self._open[number] = list(self._pages.get(number, _EMPTY))
        return page


def pop_first(table: Table[V], start: int, num_values: int) -> tuple[Table[V], list[V], int]:
    """The `num_values` values under the smallest keys, none of them below `start`: the table without them, the values
    in order, and where the next search may start. Pages go whole. Raises KeyError if there are not so many."""
    if num_values > len(table):
        raise KeyError(f"{num_values} values asked for, {len(table)} there")
    pages, found, number, next_start = table.pages.mutate(), list[V](), start // PAGE_SIZE, start
    while len(found) < num_values:
        page = pages.pop(number, _EMPTY)
        values = [value for value in page if value is not None]
        room, next_start = num_values - len(found), (number + 1) * PAGE_SIZE
        if len(values) > room:
            first_kept = [place for place, value in enumerate(page) if value is not None][room]
            pages[number] = _EMPTY[:first_kept] + page[first_kept:]
            next_start = number * PAGE_SIZE + first_kept
        found += values[:room]
        number += 1
    return Table(pages.finish(), len(table) - num_values), found, next_start


def table_of(values: Iterable[V]) -> Table[V]:
    """The values in order, under the keys 0, 1, 2, …"""
    mutation = Table[V]().mutate()
    for key, value in enumerate(values):
        mutation[key] = value
    return mutation.finish()


_EMPTY = (None,) * PAGE_SIZE
