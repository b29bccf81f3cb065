"""What becomes of a step's rows: tokens kept and told to the caller, ends, faults, beams chosen."""

from collections.abc import Callable, Iterator

import numpy as np

from pagedjax.core.errors import RequestError
from pagedjax.core.plan import Row, RowResult
from pagedjax.core.request import CompletionOutput, FinishReason
from pagedjax.engine.beams import Beams
from pagedjax.engine.live import Group, Live, forced_token, new_hash, push
from pagedjax.engine.metrics import EngineMetrics
from pagedjax.engine.outputs import Delta, EngineError, TokenLogprobs, Update, add_delta, best_of, token_logprobs
from pagedjax.engine.tokenizer import Tokenizer
from pagedjax.engine.watch import Watch
from pagedjax.runtime.results import PromptScores, StepResult
from pagedjax.runtime.sampler import Scores
from pagedjax.runtime.tokens import TokenTable

# Behind each forced token all the text that is still forced is split into tokens anew, 0.8 µs each: in a step so many,
# which take 16 ms, over all rows. What they do not suffice for is sampled, or forced by later steps; to have looked
# costs nothing more, since a mask is made from the same split.
MAX_SPLIT = 20_000


class Rows:
    """Mutable; belongs to the engine's thread. `updates` is what callers are to be told; `sequences` is the engine's
    own, by id, and beams change it."""

    def __init__(
        self,
        sequences: dict[int, Live],
        tokens: TokenTable,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        watch: Watch,
        new_sequence_id: Callable[[], int],
        block_size: int,
    ) -> None:
        self.updates: list[Update] = []
        self._sequences, self._tokens, self._tokenizer = sequences, tokens, tokenizer
        self._metrics, self._watch = metrics, watch
        self._new_sequence_id, self._block_size = new_sequence_id, block_size
        self._split_left = MAX_SPLIT  # of the step that is collected
        self._heard: list[tuple[Group, Beams]] = []  # whose beams the step that is collected contains

    def take(self, rows: tuple[Row, ...], result: StepResult, now_us: int) -> tuple[RowResult, ...]:
        """The outcome of each row of a step."""
        self._split_left = MAX_SPLIT
        return tuple([self._take(row, result, place, now_us) for place, row in enumerate(rows)])

    def _take(self, row: Row, result: StepResult, place: int, now_us: int) -> RowResult:
        """One row's outcome: the token, and those forced behind it, are appended, told to the caller and judged for a
        stop."""
        live = self._sequences[row.sequence_id]
        if live.ended:
            self._metrics.discarded_tokens.inc(row.samples)
            return RowResult(row.sequence_id, 0)
        if place in result.prompt_logprobs:
            self._take_prompt_logprobs(live, result.prompt_logprobs[place])
        if place in result.pooled:
            live.pooled += result.pooled[place]
            live.num_pooled = row.start + row.length
        if not row.samples:
            return RowResult(row.sequence_id, 0)
        if live.fault is not None:
            return self._fail_row(live, live.fault)
        token_id = result.ids[place]
        if result.faulty[place]:
            self._metrics.faulty_rows.inc()
            return self._fail_row(live, EngineError("the model gave logits that are not finite for this request"))
        if live.grammar is not None and self.is_known(row):
            return RowResult(row.sequence_id, 0)
        if live.group.beams is not None:
            assert result.logprobs is not None
            live.group.beams.hear(row.sequence_id, result.logprobs, place)
            self._heard.append((live.group, live.group.beams))
            return RowResult(row.sequence_id, 0)
        try:
            pooling = live.group.submission.pooling
            delta = self._delta(live, token_id, result, place) if pooling is None else self._pooled_delta(live)
        except RequestError as error:
            return self._fail_row(live, error)
        kept = delta.token_ids or (token_id,)
        named = self._append(live, kept)
        self._watch.tokens(live, len(kept), now_us)
        self._give(live.group, delta)
        if delta.finish_reason is not None:
            live.ended = True
            self._metrics.requests.labels(delta.finish_reason).inc()
            self._metrics.e2e.observe((now_us - live.group.arrival_us) / 1e6)
        return RowResult(row.sequence_id, len(kept), delta.finish_reason, named)

    def choose_beams(self, now_us: int) -> dict[int, RowResult]:
        """What becomes of the beams of each group of which this step has brought the last."""
        chosen: dict[int, RowResult] = {}
        for group, beams in self._heard:
            if not beams.have_all_been_heard():
                continue
            chosen |= beams.choose(self._tokens, self._new_sequence_id, self._block_size)
            for sequence_id, beam in beams.beams.items():
                self._sequences[sequence_id] = group.members[sequence_id] = beam.live
            if not beams.beams:
                self._end_beams(group, beams, now_us)
        self._heard.clear()
        return chosen

    def _end_beams(self, group: Group, beams: Beams, now_us: int) -> None:
        try:
            deltas = beams.deltas()
        except EngineError as error:
            self._metrics.requests.labels("error").inc()
            self.updates.append(Update(group.submission.request_id, None, error=error))
            return
        self._metrics.ttft.observe((now_us - group.arrival_us) / 1e6)
        self._metrics.e2e.observe((now_us - group.arrival_us) / 1e6)
        for delta in deltas:
            self._metrics.requests.labels(delta.finish_reason).inc()
            update = Update(group.submission.request_id, delta, group.num_cached_tokens or 0, group.prompt_logprobs)
            self.updates.append(update)

    def _give(self, group: Group, delta: Delta) -> None:
        """Tell the caller; where only the best samples come out, once all have ended."""
        deltas = [delta] if group.candidates is None else _best(group, group.candidates, delta)
        for each in deltas:
            request_id, num_cached_tokens = group.submission.request_id, group.num_cached_tokens or 0
            self.updates.append(
                Update(request_id, each, num_cached_tokens, group.prompt_logprobs, None, group.embedding)
            )

    def _pooled_delta(self, live: Live) -> Delta:
        """The end of a sequence whose hidden states were wanted: they go to its group, and no token comes out."""
        group = live.group
        num_averaged = len(group.submission.prompt_token_ids) if group.submission.pooling == "mean" else 1
        group.embedding = np.asarray(live.pooled, np.float32) / num_averaged
        live.num_sampled += 1
        return Delta(live.index, "", (), finish_reason=FinishReason.STOP.value)

    def is_known(self, row: Row) -> bool:
        """Whether the token that a row samples was forced while it ran."""
        return row.start + row.length < self._tokens.get(row.sequence_id).length

    def _append(self, live: Live, token_ids: tuple[int, ...]) -> tuple[bytes, ...]:
        """Add new tokens to the table; the names of the blocks that they complete."""
        named: tuple[bytes, ...] = ()
        for token_id in token_ids:
            named += new_hash(live, self._tokens.append(live.sequence_id, token_id), self._block_size)
        return named

    def _delta(self, live: Live, token_id: int, result: StepResult, place: int) -> Delta:
        """The token, and those forced behind it, as text and log-probabilities; and whether the sequence ends there."""
        text, finish, reason = push(live, token_id)
        token_ids: tuple[int, ...] = (token_id,)
        if finish is None and live.grammar is not None:
            for forced in self._forced_tokens(live):
                more, finish, reason = push(live, forced)
                text += more
                token_ids += (forced,)
                if finish is not None:
                    break
        logprobs = None
        if live.params.logprobs is not None:
            assert result.logprobs is not None
            logprobs = (self._logprobs(result.logprobs, place, live.params.logprobs),)
        return Delta(live.index, text, token_ids, logprobs, finish and finish.value, reason)

    def _forced_tokens(self, live: Live) -> Iterator[int]:
        """The tokens that are forced next, as far as this step may split their text. Each must be pushed before the
        next one is asked for."""
        while (forced := forced_token(live)) is not None and forced.num_split <= self._split_left:
            self._split_left -= forced.num_split
            yield forced.token_id

    def _take_prompt_logprobs(self, live: Live, found: PromptScores) -> None:
        if live.group.prompt_logprobs is None:
            return
        num_top, scores = live.params.prompt_logprobs or 0, found.scores
        live.group.prompt_logprobs.extend(self._logprobs(scores, i, num_top) for i in range(len(scores.ids)))

    def _logprobs(self, scores: Scores, i: int, num_top: int) -> TokenLogprobs:
        return token_logprobs(self._tokenizer, scores.ids[i], scores.logprobs[i], scores.ranks[i], num_top)

    def _fail_row(self, live: Live, error: Exception) -> RowResult:
        """End this request, and only this one."""
        self._metrics.requests.labels("error").inc()
        self.updates.append(Update(live.request_id, None, error=error))
        live.ended = True
        return RowResult(live.sequence_id, 0, FinishReason.ABORT)


def _best(group: Group, candidates: list[CompletionOutput], delta: Delta) -> list[Delta]:
    """The best samples, once the last one has ended with this delta; none before."""
    add_delta(candidates[delta.index], delta)
    have_ended = all(candidate.finished for candidate in candidates)
    return best_of(candidates, group.submission.params) if have_ended else []
