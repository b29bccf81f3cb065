"""Beam search: the likeliest continuations of a prompt, grown side by side as forks that share their blocks.

At each step every beam offers its likeliest next tokens. Of all offers, by the log-probability of the whole output,
those that end and are among the best `beam_width` are set aside, and the best `beam_width` that do not end go on. What
was set aside competes by log-probability / length ** length_penalty. (The rules of transformers' `generate`, with
early_stopping "never" or True; there as here the token that ends an output counts in its length.)

The beams need not be in one step: one that is computed before the others waits for its choice (`core.choosing`).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pagedjax.core.plan import Fork, RowResult
from pagedjax.core.request import CompletionOutput, FinishReason, SamplingParams
from pagedjax.engine.live import Live, new_hash, push
from pagedjax.engine.outputs import Delta, EngineError, TokenLogprobs, as_delta, token_logprobs
from pagedjax.engine.tokenizer import Tokenizer
from pagedjax.runtime.sampler import Scores
from pagedjax.runtime.tokens import TokenTable


class Beam(NamedTuple):
    """A sequence and its output so far."""

    live: Live
    output: CompletionOutput


class Offer(NamedTuple):
    """A beam with one more token: `rank` is the token's, 1 the likeliest, `logprob` that of the whole output."""

    logprob: float
    beam: Beam
    rank: int


@dataclass(slots=True)
class Beams:
    """The beams of one request. `heard` are the scores (ids and log-probabilities, likeliest first) of those whose rows
    are done. Mutable; belongs to the engine's thread."""

    params: SamplingParams
    tokenizer: Tokenizer
    beams: dict[int, Beam]
    heard: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    finished: list[CompletionOutput] = field(default_factory=list)

    @property
    def width(self) -> int:
        return self.params.n

    def hear(self, sequence_id: int, scores: Scores, place: int) -> None:
        """What one beam's row gave."""
        self.heard[sequence_id] = scores.ids[place, 1:], scores.logprobs[place, 1:]

    def have_all_been_heard(self) -> bool:
        return bool(self.heard) and self.heard.keys() == self.beams.keys()

    def choose(self, tokens: TokenTable, new_id: Callable[[], int], block_size: int) -> dict[int, RowResult]:
        """The beams go on, fork or end, once all have been heard: what becomes of each, by its sequence.

        Afterwards `beams` are those that go on, the best first; none, if the search is over.
        """
        going_on = self._walk()
        self.heard.clear()
        self.finished = sorted(self.finished, key=self._score, reverse=True)[: self.width]
        before, self.beams = self.beams, {}
        if self._is_over(going_on):
            reached_end = not going_on and any(one.finish_reason == FinishReason.LENGTH for one in self.finished)
            finish = FinishReason.LENGTH if reached_end else FinishReason.STOP
            return {sequence_id: _ended(beam.live, finish) for sequence_id, beam in before.items()}
        places = self._forked(going_on, tokens, new_id)
        self.beams = {beam.live.sequence_id: beam for beam in going_on}
        names = {i: new_hash(beam.live, tokens.get(i), block_size) for i, beam in self.beams.items()}
        results = {}
        for parent, beam in before.items():
            if parent not in places:
                results[parent] = _ended(beam.live, FinishReason.ABORT)
                continue
            forks = tuple([Fork(child, names[child]) for child in places[parent][1:]])
            results[parent] = RowResult(parent, 1, None, names[parent], forks)
        return results

    def deltas(self) -> list[Delta]:
        """The outputs, the best first. Raises EngineError if there are fewer continuations than beams."""
        if len(self.finished) < self.width:
            raise EngineError(f"the model gave {len(self.finished)} continuations for {self.width} beams")
        shows_logprobs = self.params.logprobs is not None
        deltas = [as_delta(index, one, shows_logprobs=shows_logprobs) for index, one in enumerate(self.finished)]
        return [d._replace(cumulative_logprob=one.cumulative_logprob) for d, one in zip(deltas, self.finished)]

    def _walk(self) -> list[Beam]:
        """The beams that go on; those that end are set aside."""
        going_on: list[Beam] = []
        for place, offer in enumerate(sorted(self._offers(), key=lambda offer: -offer.logprob)):
            beam = self._grown(offer)
            if beam.output.finish_reason is None:
                going_on.append(beam)
            elif place < self.width:
                self.finished.append(beam.output)
            if len(going_on) == self.width:
                break
        return going_on

    def _offers(self) -> list[Offer]:
        offers = []
        for sequence_id, beam in self.beams.items():
            barred = beam.live.stop_ids if beam.live.num_sampled < self.params.min_tokens else frozenset()
            so_far = beam.output.cumulative_logprob or 0.0
            ids, logprobs = self.heard[sequence_id]
            for rank, (token_id, logprob) in enumerate(zip(ids.tolist(), logprobs.tolist()), 1):
                if token_id not in barred and logprob > -math.inf:
                    offers.append(Offer(so_far + logprob, beam, rank))
        return offers

    def _grown(self, offer: Offer) -> Beam:
        """The beam with the token it offers; the beam itself stays as it is."""
        parent, output = offer.beam
        live = replace(parent, detokenizer=parent.detokenizer.copy())
        token_id = int(self.heard[live.sequence_id][0][offer.rank - 1])
        text, finish, reason = push(live, token_id)
        logprobs = None if output.logprobs is None else [*output.logprobs, self._entry(live.sequence_id, offer.rank)]
        grown = replace(
            output,
            text=output.text + text,
            token_ids=[*output.token_ids, token_id],
            cumulative_logprob=offer.logprob,
            logprobs=logprobs,
            finish_reason=finish and finish.value,
            stop_reason=reason,
        )
        return Beam(live, grown)

    def _entry(self, sequence_id: int, rank: int) -> TokenLogprobs:
        ids, logprobs = self.heard[sequence_id]
        own = slice(rank - 1, rank)
        all_ids, all_logprobs = np.concatenate([ids[own], ids]), np.concatenate([logprobs[own], logprobs])
        return token_logprobs(self.tokenizer, all_ids, all_logprobs, rank, self.params.logprobs or 0)

    def _score(self, output: CompletionOutput) -> float:
        return self._worth(output.cumulative_logprob or 0.0, len(output.token_ids))

    def _is_over(self, going_on: list[Beam]) -> bool:
        if len(self.finished) < self.width or not going_on:
            return not going_on
        return self.params.early_stopping or self._best_to_come(going_on[0].output) <= self._score(self.finished[-1])

    def _best_to_come(self, best: CompletionOutput) -> float:
        """No output that continues the best beam, or a worse one, can have a higher score: its log-probability only
        falls, and its length is what is best for the score."""
        lengths = len(best.token_ids) + 1, self.params.max_tokens or len(best.token_ids) + 1
        most = max(lengths) if self.params.length_penalty > 0 else min(lengths)
        return self._worth(best.cumulative_logprob or 0.0, most)

    def _worth(self, logprob: float, num_tokens: int) -> float:
        return logprob / math.pow(num_tokens, self.params.length_penalty)

    def _forked(self, going_on: list[Beam], tokens: TokenTable, new_id: Callable[[], int]) -> dict[int, list[int]]:
        """Append their tokens. The best beam that continues another one takes its place, the others are its forks.
        Gives the sequences that continue each."""
        by_parent: defaultdict[int, list[Beam]] = defaultdict(list)
        for beam in going_on:
            by_parent[beam.live.sequence_id].append(beam)
        for parent, beams in by_parent.items():
            for beam in beams[1:]:
                beam.live.sequence_id = new_id()
                tokens.fork(parent, beam.live.sequence_id)
            for beam in beams:
                tokens.append(beam.live.sequence_id, beam.output.token_ids[-1])
        return {parent: [beam.live.sequence_id for beam in beams] for parent, beams in by_parent.items()}


def make_beams(live: Live, params: SamplingParams, tokenizer: Tokenizer) -> Beams:
    """The search at its beginning: one beam, the prompt."""
    output = CompletionOutput(0, logprobs=None if params.logprobs is None else [])
    return Beams(params, tokenizer, {live.sequence_id: Beam(live, output)})


def _ended(live: Live, finish: FinishReason) -> RowResult:
    live.ended = True
    return RowResult(live.sequence_id, 0, finish)
