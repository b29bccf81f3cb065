"""A scheduler with callers and a device around it, for tests.

The device is a dictionary from slot to a fingerprint of the whole prefix that ends there. A row first checks that every
cached position it reads holds its own prefix, as the steps before left it, then writes its own. So a block that is
shared wrongly, read before it was computed or reused too early is seen at once, and the token that a row samples, a
function of its fingerprint, is the same however the sequence was scheduled. `check` runs after every event.

Lower tiers are dictionaries of blocks of such fingerprints, and hold rubbish while they are written. A gather reads the
cache when its effect is carried out, a fetch its tier when it is done; transfers end in any order, or fail.
"""

import random
from collections import deque
from dataclasses import replace
from typing import Any

from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.effects import CopyBlocks, Discard, Effect, Fetch, Finish, Preempt, Reject, RunStep, SwapOut
from pagedjax.core.events import Aborted, Arrived, ConfigChanged, Event, StepDone, StepDue, StepFailed, TransferDone
from pagedjax.core.invariants import check
from pagedjax.core.phases import Phase
from pagedjax.core.plan import Fork, Row, RowResult, Scatter, StepPlan, Tier
from pagedjax.core.policy import STAYS, Order, order_of, waited_us
from pagedjax.core.prefix import ROOT_HASH, hash_block
from pagedjax.core.request import FinishReason, Request
from pagedjax.core.scheduler import init, update
from pagedjax.core.state import Sequence, State
from pagedjax.core.tenants import DEFAULT_TENANT, SCALE, account
from pagedjax.core.waiting import find, in_rank_order
from pagedjax.core.yielding import is_shielded

SMALL = {
    "block_size": 4,
    "num_blocks": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "async_scheduling": False,
    "time_slice": 0,
    "min_execution_chunk": 0,
}


RUBBISH, BROKEN = (-1,), (-2,)
Contents = tuple[int | None, ...]  # of one block, by offset


class World:
    """`stop_every` ends a sequence whenever the new token is a multiple of it; `fork_every` forks a beam then, and
    `force_every` forces up to three tokens behind it. An event comes every `tick_us`. A step that contains one of
    `poison` fails.
    """

    def __init__(
        self, *, stop_every: int = 0, fork_every: int = 0, force_every: int = 0, tick_us: int = 1, **limits: Any
    ) -> None:
        self.config = SchedulerConfig(**(SMALL | limits))
        self.state: State = init(self.config)
        self.stop_every, self.fork_every, self.force_every = stop_every, fork_every, force_every
        self.poison: set[int] = set()
        self.tenants = [DEFAULT_TENANT, *dict(self.state.config.tenant_weights)]
        self.tick_us = tick_us
        self.now_us = 0
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}  # what the host knows, by sequence id
        self.on_device: dict[int, list[int]] = {}  # and what was sampled ahead of it
        self.unnamed: set[int] = set()  # whose blocks have no hashes
        self.cache: dict[int, int] = {}
        self.lower: dict[tuple[Tier, int], Contents] = {}
        self.outgoing: dict[int, tuple[SwapOut, list[Contents]]] = {}
        self.fetching: dict[int, Fetch] = {}
        self.staged: dict[int, list[Contents]] = {}
        self.sampled: deque[dict[int, int]] = deque()
        self.ended: set[int] = set()
        self.finished: dict[int, FinishReason] = {}
        self.rejected: dict[int, Reject] = {}
        self.preempted: list[int] = []
        self.num_computed = 0
        self.num_discarded = 0
        self.log: list[tuple[Event, tuple[Effect, ...]]] = []

    # ---- events

    def arrive(
        self,
        prompt: int | list[int],
        max_tokens: int = 4,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        preemptible: bool = True,
        *,
        named: bool = True,
        beam: bool = False,
    ) -> int:
        """A request: a prompt of so many tokens, equal to no other one, or these tokens."""
        sequence_id = len(self.tokens)
        if isinstance(prompt, int):
            prompt = [1000 * (sequence_id + 1) + i for i in range(prompt)]
        request = Request(sequence_id, len(prompt), max_tokens, priority, None, beam, tenant, preemptible)
        return self._arrive(request, prompt, named)

    def arrive_as_fork(self, parent: int) -> int:
        """One more sample of the same prompt."""
        request = self.requests[parent]
        prompt, sequence_id = self.tokens[parent][: request.prompt_len], len(self.tokens)
        request = request._replace(sequence_id=sequence_id, fork_of=parent)
        # Fingerprints tell tokens apart, not samples, so another sample is one that stops elsewhere.
        return self._arrive(request, prompt, parent not in self.unnamed)

    def _arrive(self, request: Request, prompt: list[int], named: bool) -> int:
        sequence_id = request.sequence_id
        self.tokens[sequence_id], self.on_device[sequence_id] = list(prompt), list(prompt)
        self.requests[sequence_id] = request
        if not named:
            self.unnamed.add(sequence_id)
        self.send(Arrived(request, self.names(sequence_id), self.tick()))
        return sequence_id

    def abort(self, sequence_id: int) -> tuple[Effect, ...]:
        if sequence_id in self.tokens:
            self.ended.add(sequence_id)
        return self.send(Aborted(sequence_id, self.tick()))

    def change(self, **changes: Any) -> None:
        """From now on another configuration applies."""
        self.send(ConfigChanged(replace(self.state.config, **changes), self.tick()))

    def due(self) -> StepPlan | None:
        """Ask for a step and run it on the device, unless there is none to plan."""
        effects = self.send(StepDue(self.tick()))
        return effects[-1].plan if effects and isinstance(effects[-1], RunStep) else None

    def done(self) -> tuple[Effect, ...]:
        """Tell the scheduler what the oldest step in flight gave."""
        if any(row.sequence_id in self.poison for row in self.state.in_flight[0].rows):
            return self.fail()
        plan, sampled = self.state.in_flight[0], self.sampled.popleft()
        results = tuple(self._result(row, sampled.get(row.sequence_id)) for row in plan.rows)
        return self.send(StepDone(plan.plan_id, results, self.tick()))

    def fail(self, *suspects: int) -> tuple[Effect, ...]:
        """The oldest step in flight fails, and the device loses its cache."""
        self.sampled.clear()
        self.cache.clear()
        self.on_device = {sequence_id: list(tokens) for sequence_id, tokens in self.tokens.items()}
        return self.send(StepFailed(self.state.in_flight[0].plan_id, suspects, self.tick()))

    def transfer(self, transfer_id: int | None = None, *, ok: bool = True) -> tuple[Effect, ...]:
        """A transfer ends, or fails; the oldest one, if none is named."""
        if transfer_id is None:
            transfer_id = min(self.state.tiers.transfers)
        if transfer_id in self.outgoing:
            swap_out, contents = self.outgoing.pop(transfer_id)
            for (_, block_id), content in zip(swap_out.moves, contents):
                self.lower[swap_out.tier, block_id] = content if ok else RUBBISH
        else:
            fetch = self.fetching.pop(transfer_id)
            contents = [self.lower[fetch.tier, block_id] for block_id in fetch.block_ids]
            assert RUBBISH not in contents, "a copy is read that is not there"
            ok = ok and BROKEN not in contents
            if ok:
                self.staged[transfer_id] = contents
            else:
                self.lower.update({(fetch.tier, block_id): BROKEN for block_id in fetch.block_ids})
        return self.send(TransferDone(transfer_id, ok, self.tick()))

    def step(self) -> StepPlan | None:
        """One whole step; whatever is in flight is done first and last."""
        while self.state.in_flight:
            self.done()
        plan = self.due()
        while self.state.in_flight:
            self.done()
        return plan

    def run(self) -> int:
        """Run until nobody is left, as far ahead as is allowed; the number of plans that took, which is within
        `step_bound`. Beams that come of a fork on the way count too."""
        num_plans, num_turns, bound, num_known = 0, 0, self.step_bound(), len(self.tokens)
        while self.state.running or self.state.waiting.places:
            num_turns += 1
            bound += 3 * sum([r.prompt_len + r.max_tokens for i, r in self.requests.items() if i >= num_known])
            num_known = len(self.tokens)
            assert num_turns < 10 * bound + 100, "it goes round in circles"
            plan = self.due()
            num_plans += plan is not None
            assert num_plans <= bound, "it takes too many steps to finish what is here"
            if plan is None or len(self.state.in_flight) == self.state.config.max_steps_in_flight:
                if self.state.tiers.transfers and (plan is None or num_plans % 2):
                    self.transfer()
                    continue
                assert self.state.in_flight, "stuck: there is work, but nothing is planned and nothing is in flight"
                self.done()
        while self.state.in_flight:
            self.done()
        while self.state.tiers.transfers:
            self.transfer()
        assert not self.staged, "staging is never freed"
        return num_plans

    def send(self, event: Event) -> tuple[Effect, ...]:
        before = self.state
        self.state, effects = update(before, event)
        self.log.append((event, effects))
        self.check_state()
        self._check_victims(before)
        self._check_admissions(before)
        self._check_turns(before)
        for effect in effects:
            self._carry_out(effect)
        self._check_conservation()
        return effects

    def check_state(self) -> None:
        check(self.state)

    def tick(self) -> int:
        self.now_us += self.tick_us
        return self.now_us

    # ---- questions

    def sequence(self, sequence_id: int) -> Sequence | None:
        """A running sequence."""
        return next((s for s in self.state.running if s.sequence_id == sequence_id), None)

    def running(self) -> list[int]:
        return [s.sequence_id for s in self.state.running]

    def waiting(self) -> list[int]:
        """The line, first in line first."""
        return [s.sequence_id for s in in_rank_order(self.state.waiting, order_of(self.state, {}).in_line)]

    def output(self, sequence_id: int) -> list[int]:
        return self.tokens[sequence_id][self.requests[sequence_id].prompt_len :]

    def effects(self, kind: type) -> list[Any]:
        """All effects of one kind so far."""
        return [effect for _, effects in self.log for effect in effects if isinstance(effect, kind)]

    def names(self, sequence_id: int) -> tuple[bytes, ...]:
        """The names of the full blocks of a sequence's tokens so far."""
        if sequence_id in self.unnamed:
            return ()
        tokens, size, names = self.tokens[sequence_id], self.state.config.block_size, [ROOT_HASH]
        for start in range(0, len(tokens) - size + 1, size):
            names.append(hash_block(names[-1], b"".join(t.to_bytes(4, "little") for t in tokens[start : start + size])))
        return tuple(names[1:])

    def here(self) -> list[int]:
        """The sequences that run or wait, in order of arrival."""
        return sorted([*self.running(), *self.state.waiting.places])

    def step_bound(self) -> int:
        """No more plans than this are needed to finish what is here, if nothing more arrives.

        Of any three plans one at least advances the best-ranked sequence that runs: it is never preempted, and what it
        lacks, blocks or tokens, others give up or use up in the two others. So the sequences could be run one by one.
        """
        return 3 * sum([self.requests[i].prompt_len + self.requests[i].max_tokens for i in self.here()])

    # ---- inside

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case RunStep(plan):
                self._execute(plan)
            case CopyBlocks(pairs):
                for source, target in pairs:
                    self._fill(target, self._contents(source))
            case SwapOut(transfer_id, tier, moves):
                self.outgoing[transfer_id] = effect, [self._contents(block_id) for block_id, _ in moves]
                self.lower.update({(tier, block_id): RUBBISH for _, block_id in moves})
            case Fetch(transfer_id):
                self.fetching[transfer_id] = effect
            case Discard(transfer_id):
                del self.staged[transfer_id]
            case Preempt(sequence_id):
                self.preempted.append(sequence_id)
            case Finish(sequence_id, reason):
                assert sequence_id not in self.finished, f"{sequence_id} finishes twice"
                self.finished[sequence_id] = reason
            case Reject(sequence_id, _, _):
                self.rejected[sequence_id] = effect

    def _contents(self, block_id: int) -> Contents:
        size = self.state.config.block_size
        return tuple([self.cache.get(slot) for slot in range(block_id * size, block_id * size + size)])

    def _fill(self, block_id: int, contents: Contents) -> None:
        """Put what was in one block into another. Nothing of what was there before is left."""
        size = self.state.config.block_size
        for offset, fingerprint in enumerate(contents):
            self.cache.pop(block_id * size + offset, None)
            if fingerprint is not None:
                self.cache[block_id * size + offset] = fingerprint

    def _scatter(self, scatter: Scatter) -> None:
        staged = self.staged.pop(scatter.transfer_id)
        assert [index for index, _ in scatter.pairs] == list(range(len(staged))), "fetched blocks are not all scattered"
        for index, block_id in scatter.pairs:
            self._fill(block_id, staged[index])

    def _execute(self, plan: StepPlan) -> None:
        for scatter in plan.scatters:
            self._scatter(scatter)
        for row in plan.rows:
            self._check_reads(row)
        written = [slot for row in plan.rows for slot in self._write(row)]
        assert len(set(written)) == len(written), "two rows write the same slot"
        self.sampled.append({row.sequence_id: self._sample(row.sequence_id) for row in plan.rows if row.samples})
        self.num_computed += plan.num_tokens

    def _check_reads(self, row: Row) -> None:
        prints = fingerprints(self.on_device[row.sequence_id][: row.start + (not row.writes)])
        for position, fingerprint in enumerate(prints):
            found = self.cache.get(self._slot(row, position))
            assert found == fingerprint, f"{row} reads a foreign token at {position}"

    def _write(self, row: Row) -> list[int]:
        end = row.start + row.length
        prints = fingerprints(self.on_device[row.sequence_id][:end])
        assert len(prints) == end, f"{row} goes past the tokens that are there"
        assert row.samples == (end == len(self.on_device[row.sequence_id])), f"{row} samples at the wrong place"
        if not row.writes:
            return []
        others = [s for s in self.state.running if s.num_planned > row.start and s.sequence_id != row.sequence_id]
        for position in range(row.start, end if others else row.start):
            block_id = row.blocks[position // self.state.config.block_size]
            clash = any(block_id in other.blocks for other in others if other.num_planned > position)
            assert not clash, f"{row} writes what others have at {position}"
        slots = [self._slot(row, position) for position in range(row.start, end)]
        self.cache.update(zip(slots, prints[row.start :]))
        return slots

    def _sample(self, sequence_id: int) -> int:
        tokens = self.on_device[sequence_id]
        # Samples of one prompt differ, in their first token at least.
        salt = sequence_id if self.requests[sequence_id].fork_of is not None else 0
        tokens.append((fingerprints(tokens)[-1] + salt) % 89 + 1)
        return tokens[-1]

    def _slot(self, row: Row, position: int) -> int:
        size = self.state.config.block_size
        return row.blocks[position // size] * size + position % size

    def _result(self, row: Row, token: int | None) -> RowResult:
        sequence_id = row.sequence_id
        num_named = 0 if sequence_id in self.unnamed else (row.start + row.length) // self.state.config.block_size
        if token is None or sequence_id in self.ended or self._is_known(row):
            self.num_discarded += token is not None
            return RowResult(sequence_id, 0)
        num_known = len(self.tokens[sequence_id])
        self.tokens[sequence_id].append(token)
        finish = self._finish(sequence_id, token)
        for _ in range(self._num_forced(sequence_id, token)):
            if finish is None:
                finish = self._finish(sequence_id, self._force(sequence_id))
        if finish is not None:
            self.ended.add(sequence_id)
        num_new = len(self.tokens[sequence_id]) - num_known
        return RowResult(sequence_id, num_new, finish, self.names(sequence_id)[num_named:], self._children(row, token))

    def _is_known(self, row: Row) -> bool:
        """Whether the token that a row samples was forced while it ran."""
        return row.start + row.length < len(self.tokens[row.sequence_id])

    def _num_forced(self, sequence_id: int, token: int) -> int:
        """How many tokens are forced behind a sampled one. Not behind a beam's, of which others may come."""
        is_forcing = self.force_every and token % self.force_every == 0
        return 1 + token % 3 if is_forcing and not self.requests[sequence_id].needs_confirmation else 0

    def _force(self, sequence_id: int) -> int:
        """The next token, which would be sampled all the same, and may have been."""
        known, on_device = self.tokens[sequence_id], self.on_device[sequence_id]
        known.append(on_device[len(known)] if len(known) < len(on_device) else self._sample(sequence_id))
        return known[-1]

    def _children(self, row: Row, token: int) -> tuple[Fork, ...]:
        """A beam goes on with other tokens too, unless it has only one more to go."""
        request = self.requests[row.sequence_id]
        num_left = request.max_tokens - len(self.output(row.sequence_id))
        if not request.needs_confirmation or not self.fork_every or token % self.fork_every or num_left < 2:
            return ()
        return tuple([self._fork(row, token + 100 * step) for step in range(1, 2 + token % 2)])

    def _fork(self, row: Row, token: int) -> Fork:
        """A sequence that goes on from this row with another token."""
        sequence_id, end = len(self.tokens), row.start + row.length
        tokens = [*self.tokens[row.sequence_id][:end], token]
        self.tokens[sequence_id], self.on_device[sequence_id] = tokens, list(tokens)
        self.requests[sequence_id] = self.requests[row.sequence_id]._replace(sequence_id=sequence_id, fork_of=None)
        if row.sequence_id in self.unnamed:
            self.unnamed.add(sequence_id)
        return Fork(sequence_id, self.names(sequence_id)[end // self.state.config.block_size :])

    def _finish(self, sequence_id: int, token: int) -> FinishReason | None:
        if self.stop_every and token % self.stop_every == 0:
            return FinishReason.STOP
        if len(self.output(sequence_id)) == self.requests[sequence_id].max_tokens:
            return FinishReason.LENGTH
        return None

    def _check_victims(self, before: State) -> None:
        """Whoever yields for want of blocks is not the best-ranked one; with one tenant, the lowest-ranked do, or the
        lowest-ranked of those who await a choice, so that others can run. Whoever yields to a better grade ranks below
        somebody in line, and is neither shielded nor reserved nor owed."""
        ran = {s.sequence_id: s for s in before.running if s.phase in STAYS}
        yielding = [s for s in self.state.running if s.phase is Phase.YIELDING and s.sequence_id in ran]
        yielding += [find(self.state.waiting, i) for i in ran if i in self.state.waiting.places]
        victims = [s for s in yielding if s.stay.reason != "failure"]
        if not victims:
            return
        order = order_of(before._replace(now_us=self.state.now_us), {})
        go_on = [s for s in self.state.running if s.phase in STAYS and s.sequence_id in ran]
        top = min(map(order.running, go_on), default=())
        last = max([order.running(s) for s in go_on if not s.stay.reserved], default=())
        last_awaiting = max([order.running(s) for s in go_on if s.awaits_choice], default=())
        waiters = [order.grade_in_line(s) for s in in_rank_order(before.waiting) if self._may_preempt(s, order)]
        for victim in victims:
            sequence = ran[victim.sequence_id]
            assert not sequence.stay.reserved, "one that must not be preempted is"
            if victim.stay.reason in ("memory", "slots"):
                chosen = len(before.tenants.accounts) > 1 and victim.stay.reason == "memory"
                others = last_awaiting if sequence.awaits_choice else top if chosen else last
                assert order.running(sequence) > others, "a victim outranks a beneficiary"
            else:
                assert waiters and min(waiters) < order.grade(sequence), "a victim outranks its beneficiary"
                assert not is_shielded(sequence, order), "a sequence is preempted too soon"
                assert not order.protects(sequence.request.tenant), "a tenant that is owed is preempted"

    def _may_preempt(self, waiter: Sequence, order: Order) -> bool:
        """In conservative mode only who is owed, aged or has waited a time slice."""
        waited, (not_owed, not_aged, _) = waited_us(waiter, order.now_us), order.grade_in_line(waiter)
        is_urgent = not (not_owed and not_aged) or waited >= order.config.time_slice_us
        return is_urgent or order.config.preemption_mode == "aggressive"

    def _check_turns(self, before: State) -> None:
        """Who gets in line starts at no less than the least counter there, or else the last one's that was there; but
        for the credit of one of which somebody runs."""
        tenants, queues = self.state.tenants, self.state.waiting.queues
        line = before.waiting.queues
        known = [account(one, name).counter for one in (before.tenants, tenants) for name in line]
        least = min(known, default=before.tenants.last_counter)
        runs, credit = {s.request.tenant for s in before.running}, self.state.config.credit
        entered = {name: account(tenants, name) for name in queues if name not in line}
        for name, tenant in entered.items():  # several at once enter one after the other
            others = [other.counter for other in entered.values() if other is not tenant]
            owed = credit * SCALE // tenant.weight if name in runs else 0
            assert tenant.counter >= min([least, *others]) - owed, "a tenant has banked credit"
        if line and not queues:
            least = min([tenant.counter for tenant in tenants.accounts.values()])
            assert tenants.last_counter >= least, "the last turn is forgotten"

    def _check_admissions(self, before: State) -> None:
        """Whoever is admitted has a slot, and room for all its tokens and a block of headroom; in some order."""
        size, needs = self.state.config.block_size, []
        for sequence in self.state.running:
            if sequence.stay.since_us == self.state.now_us > before.now_us:  # it has come to run with this event
                parked = self.state.tiers.parked.get(sequence.sequence_id)
                num_fetched = sum(len(scatter.pairs) for scatter in parked.scatters) if parked else 0
                num_shared = sequence.num_cached // size - num_fetched
                num_needed = num_blocks_for(min(sequence.num_tokens + size, sequence.max_len), size) - num_shared
                needs.append((num_needed, len(sequence.blocks) - num_shared))
        assert not needs or len(self.state.running) <= self.state.config.max_num_seqs, "there was no slot"
        # If any order works, then this one: those who need the most beyond what they take go first.
        num_free = self.state.pool.num_free + sum(num_taken for _, num_taken in needs)
        for num_needed, num_taken in sorted(needs, key=lambda need: need[1] - need[0]):
            assert num_needed <= num_free, "a sequence was admitted without headroom"
            num_free -= num_taken

    def _check_conservation(self) -> None:
        places = [*self.running(), *self.state.waiting.places, *self.finished, *self.rejected]
        assert sorted(places) == sorted(self.tokens), "a request is lost, or in two places"


def fingerprints(tokens: list[int]) -> list[int]:
    """For every position a number that stands for the whole prefix that ends there."""
    prints, last = [], 0
    for token in tokens:
        last = (last * 1_000_003 + token + 1) % 2_147_483_647
        prints.append(last)
    return prints


def random_world(seed: int, num_events: int = 300, **limits: Any) -> World:
    """A small world, often short of everything, after that many random events and then run until it is empty."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4])
    tiers = rng.choice([(0, 0), (3, 0), (12, 0), (4, 6), (0, 10)])
    world = World(
        stop_every=rng.choice([0, 5]),
        fork_every=rng.choice([0, 3]),
        **{
            "block_size": block_size,
            "num_blocks": rng.randint(5, 24),
            "max_num_seqs": rng.randint(1, 5),
            "max_num_batched_tokens": rng.randint(5, 16),
            "max_model_len": 32,
            "async_scheduling": rng.random() < 0.7,
            "enable_prefix_caching": rng.random() < 0.8,
            "max_queued_requests": rng.choice([3, 100]),
            "num_host_blocks": tiers[0],
            "num_disk_blocks": tiers[1],
            "preemption_method": rng.choice(["auto", "swap", "swap", "recompute"]),
            "swap_us_per_block": rng.choice([0, 100, 400]),
            "recompute_us_per_token": 100,
            "tenant_weights": rng.choice([{}, {"gold": 3, "silver": 2}]),
            "tick_us": 1000,
            "enable_preemption": rng.random() < 0.9,
            "preemption_mode": rng.choice(["aggressive", "aggressive", "conservative"]),
            "preemption_strategy": rng.choice(["priority", "tenant_aware"]),
            "time_slice": rng.choice([0, 0, 5]),
            "min_execution_chunk": rng.choice([0, 0, 4]),
            "max_wait_s": rng.choice([0.001, 0.05, 60.0]),
            "force_every": (0, 0, 3)[seed % 3],
            **limits,
        },
    )
    for _ in range(num_events):
        random_event(world, rng)
    world.run()
    return world


def random_event(world: World, rng: random.Random) -> None:
    choice = rng.random()
    if choice < 0.15:
        prompt = [7] * rng.randint(0, 8) + [rng.randint(0, 1) for _ in range(rng.randint(1, 7))]
        world.arrive(
            prompt,
            rng.randint(1, 9),
            rng.randint(-1, 1),
            rng.choice(world.tenants),
            rng.random() < 0.9,
            named=rng.random() < 0.8,
            beam=rng.random() < 0.2,
        )
    elif choice < 0.18 and world.tokens:
        parent = rng.randrange(len(world.tokens))
        for _ in range(rng.randint(1, 3)):
            world.arrive_as_fork(parent)
    elif choice < 0.23 and world.tokens:
        world.abort(rng.randrange(len(world.tokens)))
    elif choice < 0.24:
        random_change(world, rng)
    elif choice < 0.56:
        world.due()
    elif choice < 0.565 and world.state.in_flight:
        rows = world.state.in_flight[0].rows
        world.fail(*rng.sample([row.sequence_id for row in rows], rng.randint(0, min(2, len(rows)))))
    elif choice < 0.7 and world.state.tiers.transfers:
        world.transfer(rng.choice(sorted(world.state.tiers.transfers)), ok=rng.random() < 0.85)
    elif world.state.in_flight:
        world.done()


def random_change(world: World, rng: random.Random) -> None:
    """Another configuration, or other weights. Rarely, since everything is different then."""
    max_num_seqs = rng.randint(1, 5)
    world.change(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 16),
        async_scheduling=rng.random() < 0.7,
        enable_prefix_caching=rng.random() < 0.8,
        enable_preemption=rng.random() < 0.8,
        preemption_mode=rng.choice(["aggressive", "conservative"]),
        tenant_weights={tenant: rng.randint(1, 5) for tenant in world.tenants},
    )
