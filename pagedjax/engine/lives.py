"""The lives of the latest requests: what the scheduler was told and decided about each, and when.

A fold over events and effects, like the metrics. There are times, lengths, steps and reasons in it, no text and no
token ids. Decoding steps leave no trace between a sequence's first token and its last, so a life is short however long
its output is.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagedjax.core.effects import Effect, Fetch, Finish, Preempt, Reject, RunStep, SwapOut
from pagedjax.core.events import Aborted, Event, StepDone, TransferDone
from pagedjax.core.plan import RowResult, StepPlan
from pagedjax.core.request import Request
from pagedjax.core.state import State

MAX_ENDED = 512
# A life of more moments keeps so many of its first and of its latest.
MAX_FIRST, MAX_LATEST = 32, 32


class Moment(NamedTuple):
    """`event` is queued, admitted, prefill, first_token, preempted, swap_out, stored, fetch, fetched, transfer_failed,
    resumed, recompute, last_token, aborted, refused or finished; `facts` are numbers and reasons, by name."""

    at_us: int
    sequence_id: int
    event: str
    facts: dict[str, Any]


class LifeStory(NamedTuple):
    """A life as it is told. `arrival_s` is since 1970, times within are those of the scheduler's clock."""

    request_id: str
    tenant: str
    priority: int
    prompt_len: int
    max_tokens: int
    arrival_s: float
    is_over: bool
    num_left_out: int
    moments: tuple[Moment, ...]


@dataclass(slots=True, eq=False)
class _Life:
    request_id: str
    request: Request
    arrival_s: float
    num_here: int = 0
    num_moments: int = 0
    first: list[Moment] = field(default_factory=list)
    latest: deque[Moment] = field(default_factory=lambda: deque(maxlen=MAX_LATEST))

    def add(self, moment: Moment) -> None:
        self.num_moments += 1
        (self.first if len(self.first) < MAX_FIRST else self.latest).append(moment)

    def told(self) -> LifeStory:
        moments = (*self.first, *self.latest)
        request = self.request
        return LifeStory(
            self.request_id,
            request.tenant,
            request.priority,
            request.prompt_len,
            request.max_tokens,
            self.arrival_s,
            not self.num_here,
            self.num_moments - len(moments),
            moments,
        )


class Lives:
    """Mutable; belongs to the engine's thread, but for `find`."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._ended: deque[_Life] = deque()
        self._of_sequence: dict[int, _Life] = {}
        self._in_line: set[int] = set()
        self._started: set[int] = set()
        self._resuming: set[int] = set()
        self._tokenless: set[int] = set()

    def begin(self, request_id: str, request: Request, now_us: int) -> None:
        """A sequence of this request is about to arrive."""
        life = self._lives.get(request_id)
        if life is None or not life.num_here:
            # Its id may have been another's, which is forgotten by that.
            life = self._lives[request_id] = _Life(request_id, request, time.time())
        life.num_here += 1
        self._of_sequence[request.sequence_id] = life
        self._in_line.add(request.sequence_id)
        self._tokenless.add(request.sequence_id)
        life.add(Moment(now_us, request.sequence_id, "queued", {}))

    def see(self, before: State, event: Event, after: State, effects: tuple[Effect, ...]) -> None:
        """Take in what an event did to the scheduler's state, and what came of it."""
        match event:
            case StepDone():
                self._collected(before, event)
            case Aborted(sequence_id, now_us):
                self._add(now_us, sequence_id, "aborted")
            case TransferDone():
                self._transferred(before, event)
            case _:
                pass
        for effect in effects:
            self._decided(effect, after)

    def find(self, request_id: str) -> list[LifeStory]:
        """The lives that are known of a request, or of its prompts, which are numbered behind its id. Safe on any
        thread."""
        names = [name for name in list(self._lives) if name == request_id or _is_part(name, request_id)]
        return [life.told() for life in map(self._lives.get, names) if life is not None]

    def _decided(self, effect: Effect, state: State) -> None:
        now_us = state.now_us
        match effect:
            case RunStep(plan):
                self._planned(plan, now_us)
            case Preempt(sequence_id, num_lost_tokens, method, reason):
                self._in_line.add(sequence_id)
                self._resuming.add(sequence_id)
                facts = {"reason": reason, "method": method, "lost_tokens": num_lost_tokens}
                self._add(now_us, sequence_id, "preempted", **facts)
            case SwapOut(transfer_id, tier, moves):
                self._moved(state, transfer_id, "swap_out", tier=tier.value, blocks=len(moves))
            case Fetch(transfer_id, tier, block_ids):
                self._moved(state, transfer_id, "fetch", tier=tier.value, blocks=len(block_ids))
            case Finish(sequence_id, finish):
                self._end(now_us, sequence_id, "finished", reason=finish.value)
            case Reject(sequence_id, code, _):
                self._end(now_us, sequence_id, "refused", code=code)
            case _:
                pass

    def _planned(self, plan: StepPlan, now_us: int) -> None:
        """Decoding rows, of which there may be hundreds, are passed over as fast as may be."""
        in_line = self._in_line
        for row in [r for r in plan.rows if r.length > 1 or not r.samples or r.sequence_id in in_line]:
            sequence_id, is_first = row.sequence_id, row.sequence_id not in self._started
            if sequence_id in in_line:
                in_line.remove(sequence_id)
                self._started.add(sequence_id)
                word, known = ("admitted", "cached_tokens") if is_first else ("resumed", "kept_tokens")
                self._add(now_us, sequence_id, word, **{known: row.start})
            is_chunk = row.length > 1 or not row.samples or is_first
            # Behind its first token one computes a chunk too where a grammar has forced several: that is decoding.
            if is_chunk and (sequence_id in self._tokenless or sequence_id in self._resuming):
                word = "prefill" if sequence_id in self._tokenless else "recompute"
                self._add(now_us, sequence_id, word, step=plan.plan_id, start=row.start, tokens=row.length)
            if row.samples:
                self._resuming.discard(sequence_id)

    def _collected(self, before: State, event: StepDone) -> None:
        tokenless, results = self._tokenless, event.results + event.choices
        for result in [r for r in results if r.finish is not None or r.children or r.sequence_id in tokenless]:
            sequence_id = result.sequence_id
            if result.num_accepted and sequence_id in tokenless:
                tokenless.remove(sequence_id)
                self._add(event.now_us, sequence_id, "first_token", step=event.plan_id)
            if result.finish is not None:
                facts = {"reason": result.finish, "output_tokens": _num_output_tokens(before, result)}
                self._add(event.now_us, sequence_id, "last_token", **facts)
            for child in result.children:
                self._fork(sequence_id, child.sequence_id)

    def _fork(self, parent_id: int, child_id: int) -> None:
        life = self._of_sequence.get(parent_id)
        if life is not None:
            life.num_here += 1
            self._of_sequence[child_id] = life
            self._started.add(child_id)

    def _transferred(self, before: State, event: TransferDone) -> None:
        transfer = before.tiers.transfers.get(event.transfer_id)
        if transfer is None:
            return
        word = ("fetched" if transfer.is_fetch else "stored") if event.ok else "transfer_failed"
        for sequence_id in transfer.sequence_ids:
            self._add(event.now_us, sequence_id, word, tier=transfer.tier.value, blocks=len(transfer.block_ids))

    def _moved(self, state: State, transfer_id: int, word: str, **facts: Any) -> None:
        for sequence_id in state.tiers.transfers[transfer_id].sequence_ids:
            self._add(state.now_us, sequence_id, word, **facts)

    def _add(self, now_us: int, sequence_id: int, word: str, **facts: Any) -> None:
        life = self._of_sequence.get(sequence_id)
        if life is not None:
            life.add(Moment(now_us, sequence_id, word, facts))

    def _end(self, now_us: int, sequence_id: int, word: str, **facts: Any) -> None:
        self._add(now_us, sequence_id, word, **facts)
        for kept in (self._in_line, self._started, self._resuming, self._tokenless):
            kept.discard(sequence_id)
        life = self._of_sequence.pop(sequence_id, None)
        if life is None:
            return
        life.num_here -= 1
        if not life.num_here:
            self._bury(life)

    def _bury(self, life: _Life) -> None:
        self._ended.append(life)
        if len(self._ended) > MAX_ENDED:
            oldest = self._ended.popleft()
            # It may have begun anew, with another sequence of the same request.
            if not oldest.num_here and self._lives.get(oldest.request_id) is oldest:
                del self._lives[oldest.request_id]


def _is_part(name: str, request_id: str) -> bool:
    """Whether it is one of several prompts of a request."""
    begin, _, number = name.rpartition("-")
    return begin == request_id and number.isdecimal()


def _num_output_tokens(before: State, result: RowResult) -> int:
    found = [one for one in before.running if one.sequence_id == result.sequence_id]
    return result.num_accepted + sum([one.num_tokens - one.request.prompt_len for one in found])
