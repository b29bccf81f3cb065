"""New numbers for what a state names, and what can still matter of it: see `canonical`."""

from functools import cache
from typing import Any, NamedTuple

from pagedjax.core.plan import Tier
from tests.core.model import Asked, Model, names_of_stream

GONE = -1


class Stakes(NamedTuple):
    """What can still matter, given the requests that are here and those that are to come: the names that somebody can
    ask for; the least priority number of all; the tenants; whether their counters decide anything."""

    wanted: dict[bytes, int]
    best: int
    tenants: frozenset[str]
    counters_decide: bool


@cache
def _stakes(kinds: tuple[tuple[Asked, int, tuple[int, ...]], ...], size: int, ages: bool) -> Stakes:
    """`kinds` are the requests, for each fork the salt of its tokens, and for each beam its path."""
    wanted: dict[bytes, int] = {}
    for asked, salt, path in kinds:
        for name in names_of_stream(asked.prompt, asked.max_tokens, salt, size, path):
            wanted.setdefault(name, len(wanted))
    grades = {(asked.tenant, asked.priority) for asked, _, _ in kinds}
    tenants = frozenset(tenant for tenant, _ in grades)
    alike = len({priority for _, priority in grades}) < len(grades)
    decide = len(tenants) > 1 and (ages or alike)
    return Stakes(wanted, min((priority for _, priority in grades), default=0), tenants, decide)


class Naming:
    """New numbers for what a model's state names. Blocks get theirs as they are first met."""

    def __init__(self, model: Model) -> None:
        self.model = model
        here = model.here()
        self.sequences = {sequence_id: place for place, sequence_id in enumerate(here)}
        self.transfers = {transfer_id: place for place, transfer_id in enumerate(model.transfers())}
        self.blocks: dict[Any, dict[int, int]] = {Tier.DEVICE: {}, Tier.HOST: {}, Tier.DISK: {}}
        asked, config = model.asked, model.state.config
        kinds = [
            (asked[model.kinds[i]], i if model.requests[i].fork_of is not None else 0, model.paths.get(i, ()))
            for i in here
        ]
        kinds += [(asked[kind], 0, ()) for kind in model.to_come]
        self.stakes = _stakes(tuple(kinds), config.block_size, model.instance.slices_to_age > 0)

    def block(self, block_id: int, tier: Tier = Tier.DEVICE) -> int:
        known = self.blocks[tier]
        return known.setdefault(block_id, len(known))

    def table(self, block_ids: tuple[int, ...], tier: Tier = Tier.DEVICE) -> tuple[int, ...]:
        known = self.blocks[tier]
        return tuple([known.setdefault(block_id, len(known)) for block_id in block_ids])

    def sequence(self, sequence_id: int | None) -> int:
        return GONE if sequence_id is None else self.sequences.get(sequence_id, GONE)

    def transfer(self, transfer_id: int) -> int:
        """One that has ended already has nothing that tells it from others."""
        return self.transfers.get(transfer_id, GONE)

    def name(self, name: bytes) -> int:
        if len(name) == 32:
            return self.stakes.wanted.get(name, GONE)
        sequence_id, index, num_more = _private(name)
        place = self.sequence(sequence_id)
        return GONE if place == GONE else 10_000 * (place + 1) + 100 * index + num_more

    def names(self, names: tuple[bytes, ...]) -> tuple[int, ...]:
        return tuple([self.name(name) for name in names])


@cache
def _private(name: bytes) -> tuple[int, int, int]:
    """The sequence, the index and the number of tokens, 0 if full, of a block with a private name."""
    sequence_id, _, place = name.partition(b":")
    index, _, num_more = place.partition(b"+")
    return int(sequence_id), int(index), int(num_more or 0)
