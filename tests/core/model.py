"""Small instances of the scheduler's world, for searches of all orders of their events.

A `Model` is a `World` that can be cloned and whose events are told in words that do not depend on its history:
sequences by their place among those that are here, transfers by their place among those under way, rows by their place
in the plan. Time moves on by `("wait",)`, one slice at a time; all other events together take less than one.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

from pagedjax.core.effects import Effect
from pagedjax.core.events import StepDone
from pagedjax.core.phases import Phase
from pagedjax.core.plan import Fork, Row, RowResult, Tier
from pagedjax.core.prefix import ROOT_HASH, hash_block
from pagedjax.core.request import FinishReason, Request
from pagedjax.core.state import State
from pagedjax.core.tenants import DEFAULT_TENANT, PROMPT_COST, SAMPLE_COST, account
from pagedjax.core.tiers import LOWER_TIERS, pool_of
from pagedjax.core.waiting import in_rank_order
from tests.core.world import World, fingerprints

SLICE_US = 1_000_000
OTHER = 100  # what a fork's token has over its parent's
Step = tuple[Any, ...]  # an event in words that do not depend on the history


class Asked(NamedTuple):
    """A request that may arrive at any time, once."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    tenant: str = DEFAULT_TENANT
    preemptible: bool = True
    is_fork: bool = False  # another sample of the oldest sequence here that has this prompt
    named: bool = True
    is_beam: bool = False  # the first of a group of beams, which grows by forks


@dataclass(frozen=True, slots=True)
class Instance:
    """`num_failures` steps and as many transfers may fail on one path, `num_aborts` aborts come, beams fork `num_forks`
    times, and `num_runs` times two tokens are forced behind a sampled one. If it `waits` a time slice may be over, and
    after `slices_to_age` of them who waits is aged (0: never). `min_sample` is the number of service tokens by which a
    tenant's share is judged."""

    name: str
    asked: tuple[Asked, ...]
    limits: dict[str, Any] = field(default_factory=dict)
    num_failures: int = 1
    num_aborts: int = 9
    num_forks: int = 0
    num_runs: int = 0
    waits: bool = True
    slices_to_age: int = 0
    min_sample: int = 1_000


class Model(World):
    def __init__(self, instance: Instance) -> None:
        limits = {
            "block_size": 2,
            "num_blocks": 4,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 4,
            "max_model_len": 8,
            "async_scheduling": True,
            "num_host_blocks": 3,
            "preemption_method": "swap",
            "time_slice": SLICE_US // 1000,
            "max_wait_s": (instance.slices_to_age or 1_000_000) * SLICE_US / 1e6,
        }
        super().__init__(**(limits | instance.limits))
        self.instance = instance
        self.asked = instance.asked
        self.to_come: tuple[int, ...] = tuple(range(len(self.asked)))
        self.kinds: dict[int, int] = {}  # sequence id -> which of those asked
        self.num_failures = (instance.num_failures, instance.num_failures)  # of steps, of transfers
        self.num_aborts = instance.num_aborts
        self.num_forks = instance.num_forks
        self.num_runs = instance.num_runs
        self.paths: dict[int, tuple[int, ...]] = {}  # beam -> where it took another token than the one it came of
        self.stops: frozenset[int] = frozenset()
        self.forks: frozenset[int] = frozenset()
        self.runs: frozenset[int] = frozenset()

    def clone(self) -> "Model":
        copy = object.__new__(Model)
        copy.__dict__ = self.__dict__ | {
            "requests": dict(self.requests),
            "tokens": {i: list(tokens) for i, tokens in self.tokens.items()},
            "on_device": {i: list(tokens) for i, tokens in self.on_device.items()},
            "unnamed": set(self.unnamed),
            "cache": dict(self.cache),
            "lower": dict(self.lower),
            "outgoing": dict(self.outgoing),
            "fetching": dict(self.fetching),
            "staged": dict(self.staged),
            "sampled": deque(self.sampled),
            "ended": set(self.ended),
            "finished": dict(self.finished),
            "rejected": dict(self.rejected),
            "preempted": [],
            "kinds": dict(self.kinds),
            "paths": dict(self.paths),
            "log": [],
        }
        return copy

    def share_with(self, parent: "Model") -> None:
        """Hold only once what is as it was in the state before: many thousand models wait to be looked into."""
        self.log = []
        before = parent.__dict__
        for name, value in self.__dict__.items():
            if value is not before[name] and value == before[name]:
                self.__dict__[name] = before[name]

    # ---- events

    def transfers(self) -> list[int]:
        """Those under way, in an order that what they move gives: their numbers decide nothing."""
        transfers = self.state.tiers.transfers
        if len(transfers) < 2:
            return list(transfers)
        places = {sequence_id: place for place, sequence_id in enumerate(self.here())}

        def moved(transfer_id: int) -> Any:
            one = transfers[transfer_id]
            names = [_in_place(name, places) for name in one.names]
            return one.is_fetch, one.tier, [places.get(i, -1) for i in one.sequence_ids], names, transfer_id

        return sorted(transfers, key=moved)

    def steps(self) -> Iterator[Step]:
        """Every event that may come next."""
        here, state = self.here(), self.state
        yield ("due",)
        if state.in_flight:
            yield from self._ways_to_be_done()
            if self.num_failures[0]:
                rows = range(len(state.in_flight[0].rows))
                yield from [("fail", ()), *(("fail", (row,)) for row in rows if len(rows) > 1)]
        for place in range(len(state.tiers.transfers)):
            yield ("transfer", place, True)
            if self.num_failures[1]:
                yield ("transfer", place, False)
        for kind in self.to_come:
            if self._may_arrive(kind):
                yield ("arrive", kind)
        if self.instance.num_aborts:
            # Of one that has ended already it changes nothing, and does not count.
            able = [i for i in here if self.num_aborts or i in self.ended]
            yield from [("abort", here.index(i)) for i in able if i in self.ended or i == self._group(i)[0]]
        if here and self.instance.waits:
            yield ("wait",)

    def take(self, step: Step) -> None:
        """Carry out a step, and check what it leaves behind, but for `invariants.check`."""
        before, self.log = self.state, []
        self._send(step)
        self.check_contents()
        self.check_service(before)

    def _send(self, step: Step) -> None:
        match step:
            case ("due",):
                self.due()
            case ("done", *ways):
                sampled, ways = self._to_choose_for(), [*ways, (), ()][:3]
                self.stops, self.forks, self.runs = (frozenset(sampled[place] for place in way) for way in ways)
                self.num_forks, self.num_runs = self.num_forks - len(self.forks), self.num_runs - len(self.runs)
                self.done()
                self.stops = self.forks = self.runs = frozenset()
            case ("fail", suspects):
                rows = self.state.in_flight[0].rows
                self.num_failures = (self.num_failures[0] - 1, self.num_failures[1])
                self.fail(*(rows[row].sequence_id for row in suspects))
                for sequence_id in [i for i in self.paths if self.finished.get(i) is FinishReason.ERROR]:
                    self._abort_group(sequence_id)
            case ("transfer", place, ok):
                if not ok:
                    self.num_failures = (self.num_failures[0], self.num_failures[1] - 1)
                self.transfer(self.transfers()[place], ok=ok)
            case ("arrive", kind):
                self.arrive_as(kind)
            case ("abort", place):
                sequence_id = self.here()[place]
                self.num_aborts -= sequence_id not in self.ended
                self._abort_group(sequence_id)
            case ("wait",):
                self.now_us += SLICE_US
            case _:
                raise ValueError(step)

    def names(self, sequence_id: int) -> tuple[bytes, ...]:
        if sequence_id in self.unnamed:
            return ()
        asked, size = self.asked[self.kinds[sequence_id]], self.state.config.block_size
        salt, path = sequence_id if asked.is_fork else 0, self.paths.get(sequence_id, ())
        names = names_of_stream(asked.prompt, asked.max_tokens, salt, size, path)
        return names[: len(self.tokens[sequence_id]) // size]

    def check_state(self) -> None:
        """Done once for each canonical state, not for each event that leads to it: see `search`."""

    def arrive_as(self, kind: int) -> None:
        self.to_come = tuple(k for k in self.to_come if k != kind)
        asked, sequence_id = self.asked[kind], len(self.tokens)
        self.kinds[sequence_id] = kind
        parent = self._parent(kind) if asked.is_fork else None
        length = len(asked.prompt)
        request = Request(
            sequence_id,
            length,
            asked.max_tokens,
            asked.priority,
            parent,
            asked.is_beam,
            asked.tenant,
            asked.preemptible,
        )
        if asked.is_beam:
            self.paths[sequence_id] = ()
        self._arrive(request, list(asked.prompt), asked.named)

    def _parent(self, kind: int) -> int | None:
        prompt = self.asked[kind].prompt
        return next((i for i in self.here() if self.asked[self.kinds[i]].prompt == prompt), None)

    def _may_arrive(self, kind: int) -> bool:
        """Equal requests come in order; a fork while its parent is here."""
        asked = self.asked[kind]
        if any(self.asked[earlier] == asked for earlier in self.to_come if earlier < kind):
            return False
        return not asked.is_fork or self._parent(kind) is not None

    # ---- what a step gives

    def _to_choose_for(self) -> list[int]:
        """Who gets a token when the oldest plan is done: the rows that sample one that is not known, and the beams that
        await a choice. A beam only if all of its group have been heard by then."""
        rows = [row.sequence_id for row in self.state.in_flight[0].rows if row.samples and not self._is_known(row)]
        sampled = [i for i in [*rows, *self._awaiting()] if i not in self.ended]
        return [i for i in sampled if set(self._group(i)) <= set(sampled)]

    def _awaiting(self) -> list[int]:
        return [s.sequence_id for s in [*self.state.running, *in_rank_order(self.state.waiting)] if s.awaits_choice]

    def _group(self, sequence_id: int) -> list[int]:
        """The beams of a beam's request that have not ended. Others are alone."""
        if sequence_id not in self.paths:
            return [sequence_id]
        kind = self.kinds[sequence_id]
        return [i for i in self.here() if self.kinds[i] == kind and i not in self.ended]

    def _abort_group(self, sequence_id: int) -> None:
        """Whoever asked is gone, so with one beam all are. One that has ended may be aborted once more."""
        for i in self._group(sequence_id) if sequence_id not in self.ended else [sequence_id]:
            self.abort(i)

    def _ways_to_be_done(self) -> Iterator[Step]:
        """All go on, first; then any that get a token and do not end anyway stop, or fork if they are beams, or get
        others that are forced if they are not."""
        ways = []
        for place, i in enumerate(self._to_choose_for()):
            if len(self.output(i)) + 1 < self.requests[i].max_tokens:
                ways.append([(place, "go"), (place, "stop"), (place, "fork" if i in self.paths else "run")])
        for choice in product(*ways):
            stops, forks, runs = (tuple([p for p, way in choice if way == what]) for what in ("stop", "fork", "run"))
            if len(forks) <= self.num_forks and len(runs) <= self.num_runs:
                yield ("done", stops, forks, runs) if runs else ("done", stops, forks) if forks else ("done", stops)

    def done(self) -> tuple[Effect, ...]:
        plan, sampled = self.state.in_flight[0], self.sampled.popleft()
        chosen, awaiting = self._to_choose_for(), self._awaiting()
        known = {i: token for i, token in sampled.items() if i in chosen or i not in self.paths}
        results = [self._result(row, known.get(row.sequence_id)) for row in plan.rows]
        choices = [self._choice(i) for i in awaiting if i in chosen]
        return self.send(StepDone(plan.plan_id, tuple(results), self.tick(), tuple(choices)))

    def _choice(self, sequence_id: int) -> RowResult:
        row = Row(sequence_id, len(self.tokens[sequence_id]) - 1, 1, (), True)
        return self._result(row, self.on_device[sequence_id][-1])

    def _num_forced(self, sequence_id: int, token: int) -> int:
        return 2 if sequence_id in self.runs else 0

    def _children(self, row: Row, token: int) -> tuple[Fork, ...]:
        return (self._fork(row, token + OTHER),) if row.sequence_id in self.forks else ()

    def _fork(self, row: Row, token: int) -> Fork:
        child, parent = len(self.tokens), row.sequence_id
        self.kinds[child], self.paths[child] = self.kinds[parent], (*self.paths[parent], row.start + row.length)
        return super()._fork(row, token)

    def fail(self, *suspects: int) -> tuple[Effect, ...]:
        heard = {i: self.on_device[i] for i in self._awaiting()}
        effects = super().fail(*suspects)
        self.on_device |= heard
        return effects

    def _finish(self, sequence_id: int, token: int) -> FinishReason | None:
        return FinishReason.STOP if sequence_id in self.stops else super()._finish(sequence_id, token)

    # ---- what every block must hold

    def check_contents(self) -> None:
        """Every block holds what its table or its name says, also if nobody reads it now. So what is in the blocks
        follows from the scheduler's state, and need not be told apart from it."""
        state, size = self.state, self.state.config.block_size
        for sequence in state.running:
            parked = state.tiers.parked.get(sequence.sequence_id)
            fetched = {b for scatter in parked.scatters for _, b in scatter.pairs} if parked else set()
            prints = self.prints(sequence.sequence_id)
            for position in range(sequence.num_planned):
                block_id = sequence.blocks[position // size]
                if block_id not in fetched:
                    found = self.cache.get(block_id * size + position % size)
                    assert found == prints[position], "a block does not hold what its table says"
        for name, block_id in state.pool.cached.items():
            self._check_named(name, self._contents(block_id))
        for tier in LOWER_TIERS:
            self._check_tier(tier)
        tiers = state.tiers
        assert set(tiers.transfers) == self.outgoing.keys() | self.fetching.keys(), (
            "a transfer is unknown, or forgotten"
        )
        due = {s.transfer_id for p in tiers.parked.values() for s in p.scatters if s.transfer_id not in p.awaited}
        assert due == self.staged.keys(), "a staging is lost, or never freed"

    def _check_tier(self, tier: Tier) -> None:
        transfers = self.state.tiers.transfers.values()
        written = {b for t in transfers if t.tier is tier and not t.is_fetch for b in t.block_ids}
        for name, block_id in pool_of(self.state.tiers, tier).cached.items():
            if block_id not in written:
                self._check_named(name, self.lower[tier, block_id])

    def _check_named(self, name: bytes, contents: tuple[int | None, ...]) -> None:
        expected = self.meaning(name)
        assert contents[: len(expected)] == expected, "a block does not hold what its name says"

    def meaning(self, name: bytes) -> tuple[int, ...]:
        if len(name) == 32:
            return _meanings(self.asked, self.state.config.block_size)[name]
        sequence_id, _, place = name.partition(b":")
        index, _, num_more = place.partition(b"+")
        size = self.state.config.block_size
        start = int(index) * size
        return self.prints(int(sequence_id))[start : start + int(num_more or size)]

    def prints(self, sequence_id: int) -> tuple[int, ...]:
        salted = self.requests[sequence_id].fork_of is not None
        asked = self.asked[self.kinds[sequence_id]]
        path = self.paths.get(sequence_id, ())
        return stream(asked.prompt, asked.max_tokens, sequence_id if salted else 0, path)[1]

    # ---- who pays

    def check_service(self, before: State) -> None:
        """A new plan costs its tenants what it computes for the first time and what it samples; what a finished one has
        sampled in vain is given back, and what was forced is paid; nothing else is booked."""
        due: Counter[str] = Counter()
        here = {s.sequence_id: s for s in self.state.running}
        for plan in self.state.in_flight[-1:]:
            for row in plan.rows if plan.plan_id >= before.next_plan_id else ():
                sequence = here[row.sequence_id]
                end = min(row.start + row.length, sequence.request.prompt_len)
                num_new = max(0, end - max(row.start, sequence.stay.num_served))
                due[sequence.request.tenant] += PROMPT_COST * num_new + SAMPLE_COST * row.samples
        if self.log and isinstance(self.log[-1][0], StepDone):
            known = {s.sequence_id: s for s in before.running}
            for row, result in zip(before.in_flight[0].rows, self.log[-1][0].results):
                sequence, tenant = known[row.sequence_id], self.requests[row.sequence_id].tenant
                has_ended = sequence.phase in (Phase.FINISHING, Phase.ABORTING)
                if row.samples and (has_ended or row.start + row.length < sequence.num_tokens):
                    due[tenant] -= SAMPLE_COST
                due[tenant] += SAMPLE_COST * max(0, result.num_accepted - 1)
        booked = {
            name: tenant.service - account(before.tenants, name).service
            for name, tenant in self.state.tenants.accounts.items()
        }
        assert {n: x for n, x in booked.items() if x} == {n: x for n, x in due.items() if x}, "a tenant pays wrongly"

    def is_idle(self) -> bool:
        return not (self.state.running or self.state.waiting.places or self.state.tiers.transfers)


def _in_place(name: bytes, places: dict[int, int]) -> bytes:
    """A private name, which tells a sequence's number, with its place instead."""
    if len(name) == 32:
        return name
    sequence_id, _, place = name.partition(b":")
    return b"%d:%s" % (places.get(int(sequence_id), -1), place)


@cache
def stream(
    prompt: tuple[int, ...], max_tokens: int, salt: int, path: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All tokens that a request can come to have, and the fingerprints of their prefixes. One more than it may have is
    sampled ahead. At the places in `path` a beam has another token than the likeliest."""
    tokens = list(prompt)
    for _ in range(max_tokens + 1):
        tokens.append((fingerprints(tokens)[-1] + salt) % 89 + 1 + (OTHER if len(tokens) in path else 0))
    return tuple(tokens), tuple(fingerprints(tokens))


@cache
def names_of_stream(
    prompt: tuple[int, ...], max_tokens: int, salt: int, size: int, path: tuple[int, ...] = ()
) -> tuple[bytes, ...]:
    tokens, names = stream(prompt, max_tokens, salt, path)[0], [ROOT_HASH]
    for start in range(0, len(tokens) - size + 1, size):
        names.append(hash_block(names[-1], b"".join(t.to_bytes(4, "little") for t in tokens[start : start + size])))
    return tuple(names[1:])


@cache
def _meanings(asked: tuple[Asked, ...], size: int) -> dict[bytes, tuple[int, ...]]:
    """What a block of each name holds. Any sequence id may be the salt of a fork, and a beam may fork anywhere."""
    found = {}
    for one in asked:
        salts = range(len(asked)) if one.is_fork else (0,)
        for salt, path in product(salts, _paths(one) if one.is_beam else ((),)):
            prints = stream(one.prompt, one.max_tokens, salt, path)[1]
            for index, name in enumerate(names_of_stream(one.prompt, one.max_tokens, salt, size, path)):
                found[name] = prints[index * size : index * size + size]
    return found


def _paths(asked: Asked) -> list[tuple[int, ...]]:
    first = len(asked.prompt)
    places = range(first, first + asked.max_tokens)
    return [path for num in range(len(places) + 1) for path in combinations(places, num)]
