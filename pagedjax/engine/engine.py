"""The step loop's body: events in, effects carried out.

The engine owns the only mutable things: the latest State, the token table, the detokenizers and the runner. It turns
what callers and the device say into events, folds them with `update`, and runs the effects. One step stays in flight:
step n + 1 is planned and dispatched before the ids of step n are read.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import RequestError
from pagedjax.core.plan import Row, RowResult, StepPlan
from pagedjax.core.request import CompletionOutput, FinishReason, SamplingParams
from pagedjax.core.scheduler import init, refusal, refused_param, update
from pagedjax.core.state import (
    Aborted,
    Arrived,
    Effect,
    Event,
    Finish,
    Phase,
    Preempt,
    Reject,
    RunStep,
    StepDone,
    StepDue,
    SwapOut,
)
from pagedjax.core.tenants import DEFAULT_TENANT
from pagedjax.engine.beams import Beams, make_beams
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.detokenizer import Detokenizer
from pagedjax.engine.device import Device
from pagedjax.engine.grammar import Grammars
from pagedjax.engine.live import Group, Live, new_hash, push
from pagedjax.engine.metrics import EngineMetrics
from pagedjax.engine.outputs import Delta, EngineError, TokenLogprobs, Update, add_delta, best_of, token_logprobs
from pagedjax.engine.record import Recorder
from pagedjax.engine.submission import Pooling, Submission, check_queue, seed_for, submission
from pagedjax.engine.tokenizer import Tokenizer
from pagedjax.runtime.results import StepResult
from pagedjax.runtime.runner import Runner
from pagedjax.runtime.sampler import Scores

# How long to wait for a transfer when there is nothing else to do: new requests have to be looked at too.
_IDLE_WAIT_S = 0.005


class Engine:
    """Requests in, deltas out, one `step` at a time. Belongs to one thread, except `prepare`."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: SchedulerConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        now_us: Callable[[], int] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._update = update if recorder is None else recorder.watch(update)
        self.config = config
        self.runner = runner
        self.tokenizer = tokenizer
        self.state = init(scheduler)
        self.metrics = EngineMetrics(lambda: self.state)
        self._now_us = now_us or (lambda: time.monotonic_ns() // 1000)
        self._groups: dict[str, Group] = {}
        self._live: dict[int, Live] = {}
        self._grammars = Grammars(tokenizer)
        self._num_structured = 0
        self._device = Device(runner, self.metrics, self._now_us)
        self._updates: list[Update] = []
        self._decided_us: dict[int, int] = {}
        self._switches_us: list[int] = []
        self._heard: list[tuple[Group, Beams]] = []  # whose beams the step that is collected contains
        self._next_sequence_id = 0
        self._num_recompiles = runner.recompiles

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do: copies may be on their way to a lower tier when all requests have ended."""
        return not self._live and not self.state.tiers.transfers

    def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        preemptible: bool = True,
        cache_salt: str = "",
        pooling: Pooling | None = None,
    ) -> Submission:
        """Check and tokenise a request; safe on any thread. Raises RequestError."""
        request = submission(
            self.tokenizer,
            self.state.config,
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            preemptible=preemptible,
            cache_salt=cache_salt,
            pooling=pooling,
        )
        wish = request.params.structured_outputs
        return request if wish is None else request._replace(grammar=self._grammars.compile(wish))

    def check(self, requests: Sequence[Submission]) -> None:
        """Raise RequestError if one of the requests would be refused as things are, or all together for ever.

        Safe on any thread.
        """
        check_queue(requests, self.state.config)
        for request in requests:
            refused = refusal(self.state, request.for_scheduler(0))
            if refused is not None:
                self.metrics.requests.labels("refused").inc()
                self.metrics.tenants.count_refused(request.tenant)
                param = refused_param(self.state, request.for_scheduler(0))
                raise RequestError(refused.message, param=param, code=refused.code)

    def add(self, request: Submission) -> None:
        """Queue a request. Raises RequestError, and leaves nothing behind, if it can never run or the queue is full."""
        if request.request_id in self._groups:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        group = Group(request, self._now_us())
        if request.params.num_samples > request.params.n:
            group.candidates = [CompletionOutput(i, logprobs=[]) for i in range(request.params.num_samples)]
        self._groups[request.request_id] = group
        try:
            # Beams come of one sequence.
            for index in range(1 if request.params.beam_width else request.params.num_samples):
                self._add_sequence(group, index)
        except RequestError:
            self.abort(request.request_id)
            raise

    def abort(self, request_id: str) -> None:
        """Drop a request; its sequences leave by the last step in flight that contains them. Ignores unknown ids."""
        group = self._groups.pop(request_id, None)
        for live in list(group.members.values()) if group else ():
            if not live.ended:
                live.ended = True
                self.metrics.requests.labels("abort").inc()
            self._send(Aborted(live.sequence_id, self._now_us()))

    def abort_all(self) -> None:
        """Drop every request and wait for the steps and the transfers in flight."""
        for request_id in list(self._groups):
            self.abort(request_id)
        while self._device.num_in_flight:
            self.step()
        while self.state.tiers.transfers:
            self._end_transfers(_IDLE_WAIT_S)

    def step(self) -> list[Update]:
        """Plan and dispatch what may be in flight, wait for the oldest step, and give what it brought.

        A step that fails costs its time. Raises EngineError, and ends the engine, if they keep failing.
        """
        if self._device.num_in_flight < len(self.state.in_flight):
            raise EngineError("a step was broken off, or steps keep failing: this engine cannot go on, make a new one")
        self._end_transfers()
        self._dispatch()
        if self._device.num_in_flight:
            self._collect()
        else:
            self._end_transfers(_IDLE_WAIT_S)
        updates, self._updates = self._updates, []
        for failed in [u.request_id for u in updates if u.error is not None]:
            self.abort(failed)
        return updates

    def _dispatch(self) -> None:
        while len(self.state.in_flight) < self.state.config.max_steps_in_flight:
            num_in_flight = len(self.state.in_flight)
            started = time.perf_counter()
            self._send(StepDue(self._now_us()))
            self.metrics.step_time.labels("schedule").inc(time.perf_counter() - started)
            for sequence in self.state.running:
                if sequence.phase is Phase.YIELDING:
                    self._decided_us.setdefault(sequence.sequence_id, self.state.now_us)
            if len(self.state.in_flight) == num_in_flight:
                return

    def _collect(self) -> None:
        started = time.perf_counter()
        result = self._device.collect()
        if isinstance(result, Exception):
            self._start_over(result)
            return
        collected = time.perf_counter()
        plan = self.state.in_flight[0]
        now_us = self._now_us()
        results = tuple([self._take_row(row, result, place, now_us) for place, row in enumerate(plan.rows)])
        chosen = self._choose_beams(now_us) if self._heard else {}
        if chosen:
            results = tuple([chosen.pop(row.sequence_id, row) for row in results])
        choices = tuple(chosen.values())
        self.metrics.generation_tokens.inc(sum([row.num_accepted for row in (*results, *choices)]))
        self._sample_deferred()
        processed = time.perf_counter()
        self._send(StepDone(plan.plan_id, results, self._now_us(), choices))
        self._count_step(plan, wait=collected - started, process=processed - collected)

    def _start_over(self, error: Exception) -> None:
        """A step failed. Its sequences go on from their last token; one that fails alone too ends with an error."""
        failed = self._device.fail(error)
        for live in self._live.values():
            if live.params.prompt_logprobs is not None and live.group.prompt_logprobs is not None:
                # What the lost steps would have scored is to be scored again.
                self.runner.tokens.get(live.sequence_id).num_scored = len(live.group.prompt_logprobs)
            if live.group.submission.pooling is not None:
                self.runner.tokens.get(live.sequence_id).num_pooled = live.num_pooled
        self._send(failed)

    def _end_transfers(self, timeout_s: float = 0.0) -> None:
        for event in self._device.ended_transfers(timeout_s):
            self._send(event)

    def _send(self, event: Event) -> None:
        self.state, effects = self._update(self.state, event)
        if effects:
            self._carry_out(effects)

    def _carry_out(self, effects: tuple[Effect, ...]) -> None:
        if any(isinstance(effect, Preempt) for effect in effects):
            self._note_parked(effects)
        for effect in effects:
            match effect:
                case RunStep(plan):
                    self._note_rows(plan)
                    self._device.start(plan, defers_sampling=self._is_structured(plan))
                    if self._device.num_in_flight == 1:
                        self._sample_deferred()
                case Preempt():
                    self.runner.release(effect.sequence_id)
                    self._note_preemption(effect)
                case Finish(sequence_id, reason):
                    self.runner.release(sequence_id)
                    self.runner.tokens.drop(sequence_id)
                    self._decided_us.pop(sequence_id, None)
                    self._forget(self._live.pop(sequence_id), reason)
                case Reject(sequence_id, code, message):
                    self.runner.tokens.drop(sequence_id)
                    live = self._live.pop(sequence_id)
                    self.metrics.tenants.count_refused(live.group.submission.tenant)
                    self._forget(live)
                    self.metrics.requests.labels("refused").inc()
                    param = refused_param(self.state, live.group.submission.for_scheduler(sequence_id))
                    raise RequestError(message, param=param, code=code)
                case _:
                    self._device.carry_out(effect)

    def _forget(self, live: Live, reason: FinishReason | None = None) -> None:
        group, request_id = live.group, live.request_id
        self._num_structured -= live.grammar is not None
        if reason is FinishReason.ERROR and not live.ended:
            self.metrics.requests.labels("error").inc()
            error = EngineError("the device failed at each step that ran this request")
            self._updates.append(Update(request_id, None, error=error))
        del group.members[live.sequence_id]
        # An aborted request is gone from there, and another may have its id by now.
        if not group.members and self._groups.get(request_id) is group:
            del self._groups[request_id]

    def _note_parked(self, effects: tuple[Effect, ...]) -> None:
        """Count the blocks of the preempted that lower tiers keep: those copied now, and those that had a copy."""
        num_dirty = sum([len(effect.moves) for effect in effects if isinstance(effect, SwapOut)])
        parked = [self.state.tiers.parked.get(e.sequence_id) for e in effects if isinstance(e, Preempt)]
        num_kept = sum([len(one.copies) for one in parked if one is not None])
        self.metrics.parked_blocks.labels("dirty").inc(num_dirty)
        self.metrics.parked_blocks.labels("clean").inc(max(num_kept - num_dirty, 0))

    def _note_preemption(self, effect: Preempt) -> None:
        self._live[effect.sequence_id].is_running = False
        self.metrics.preemptions.labels(effect.reason, effect.method).inc()
        self.metrics.recomputed_tokens.inc(effect.num_lost_tokens)
        decided_us = self._decided_us.pop(effect.sequence_id, self.state.now_us)
        if effect.reason not in ("memory", "failure"):
            self._switches_us.append(decided_us)

    def _note_rows(self, plan: StepPlan) -> None:
        """Count what starts or resumes with this step. Whoever does so profits from the oldest preemption by rank."""
        now_us = self._now_us()
        for row in plan.rows:
            live = self._live[row.sequence_id]
            if live.is_running:
                continue
            live.is_running = True
            if self._switches_us:
                self.metrics.context_switch_time.observe((now_us - self._switches_us.pop(0)) / 1e6)
            if not live.started:
                self._count_start(live, row, now_us)

    def _count_start(self, live: Live, row: Row, now_us: int) -> None:
        """A sequence's first row starts behind what the prefix cache had of its prompt."""
        live.started = True
        group, prompt_len = live.group, len(live.group.submission.prompt_token_ids)
        self.metrics.queried_tokens.inc(prompt_len)
        self.metrics.cached_tokens.inc(row.start)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = row.start
            wait_s = (now_us - group.arrival_us) / 1e6
            self.metrics.queue_time.observe(wait_s)
            self.metrics.tenants.observe_wait(group.submission.tenant, wait_s)
            self.metrics.prompt_tokens.inc(prompt_len)

    def _add_sequence(self, group: Group, index: int) -> None:
        request, sequence_id = group.submission, self._new_sequence_id()
        params = request.params
        if index > 0 and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        if group.candidates is not None and params.logprobs is None:
            params = replace(params, logprobs=0)  # they say which samples are the best
        if params.beam_width is not None:
            params = replace(params, logprobs=params.logprobs or 0, temperature=0.0)
        # Every prompt token must be computed to be scored or averaged, so such a sequence takes nothing from the prefix
        # cache. Its forks share its blocks, and so have no names for them either.
        is_named = request.params.prompt_logprobs is None and request.pooling != "mean"
        hashes = request.block_hashes if is_named else ()
        eos = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
        live = Live(
            sequence_id,
            index,
            group,
            params,
            eos | frozenset(params.stop_token_ids or ()),
            self._detokenizer(params),
            (hashes[-1] if hashes else request.root_hash) if is_named else None,
            request.grammar and request.grammar.copy(),
        )
        self._num_structured += live.grammar is not None
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        if params.beam_width is not None:
            group.beams = make_beams(live, request.params, self.tokenizer)
        self.runner.tokens.add(
            sequence_id,
            request.prompt_token_ids,
            params,
            seed=seed_for(params, index, self.config.seed, sequence_id),
            stop_token_ids=live.stop_ids,
            pooling=request.pooling,
        )
        self._live[sequence_id] = group.members[sequence_id] = live
        # No step comes between the arrivals of a request's sequences, so the first one is still there.
        fork_of = sequence_id - index if index > 0 else None
        self._send(Arrived(request.for_scheduler(sequence_id, fork_of), hashes, group.arrival_us))

    def _new_sequence_id(self) -> int:
        self._next_sequence_id += 1
        return self._next_sequence_id - 1

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            self.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=tuple(params.stop or ()),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _take_row(self, row: Row, result: StepResult, place: int, now_us: int) -> RowResult:
        """One row's outcome: the token is appended, told to the caller and judged for a stop."""
        live = self._live[row.sequence_id]
        if live.ended:
            self.metrics.discarded_tokens.inc(row.samples)
            return RowResult(row.sequence_id, 0)
        self._take_prompt_logprobs(live, result, place)
        if result.pooled and place in result.pooled:
            live.pooled += result.pooled[place]
            live.num_pooled = row.start + row.length
        if not row.samples:
            return RowResult(row.sequence_id, 0)
        if live.fault is not None:
            return self._fail_row(live, live.fault)
        token_id = int(result.ids[place])
        if result.faulty[place]:
            self.metrics.faulty_rows.inc()
            return self._fail_row(live, EngineError("the model gave logits that are not finite for this request"))
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
        self.runner.tokens.append(row.sequence_id, token_id)
        self._observe_token(live, now_us)
        self._give(live.group, delta)
        if delta.finish_reason is not None:
            live.ended = True
            self.metrics.requests.labels(delta.finish_reason).inc()
            self.metrics.e2e.observe((now_us - live.group.arrival_us) / 1e6)
        named = new_hash(live, self.runner.tokens.get(row.sequence_id), self.state.config.block_size)
        return RowResult(row.sequence_id, 1, delta.finish_reason, named)

    def _choose_beams(self, now_us: int) -> dict[int, RowResult]:
        """What becomes of the beams of each group of which this step has brought the last."""
        chosen: dict[int, RowResult] = {}
        for group, beams in self._heard:
            if not beams.have_all_been_heard():
                continue
            chosen |= beams.choose(self.runner.tokens, self._new_sequence_id, self.state.config.block_size)
            for sequence_id, beam in beams.beams.items():
                self._live[sequence_id] = group.members[sequence_id] = beam.live
            if not beams.beams:
                self._end_beams(group, beams, now_us)
        self._heard.clear()
        return chosen

    def _end_beams(self, group: Group, beams: Beams, now_us: int) -> None:
        try:
            deltas = beams.deltas()
        except EngineError as error:
            self.metrics.requests.labels("error").inc()
            self._updates.append(Update(group.submission.request_id, None, error=error))
            return
        self.metrics.ttft.observe((now_us - group.arrival_us) / 1e6)
        self.metrics.e2e.observe((now_us - group.arrival_us) / 1e6)
        for delta in deltas:
            self.metrics.requests.labels(delta.finish_reason).inc()
            update = Update(group.submission.request_id, delta, group.num_cached_tokens or 0, group.prompt_logprobs)
            self._updates.append(update)

    def _give(self, group: Group, delta: Delta) -> None:
        """Tell the caller; where only the best samples come out, once all have ended."""
        deltas, request = [delta], group.submission
        if group.candidates is not None:
            add_delta(group.candidates[delta.index], delta)
            have_ended = all(candidate.finished for candidate in group.candidates)
            deltas = best_of(group.candidates, request.params) if have_ended else []
        for each in deltas:
            update = Update(
                request.request_id,
                each,
                group.num_cached_tokens or 0,
                group.prompt_logprobs,
                embedding=group.embedding,
            )
            self._updates.append(update)

    def _pooled_delta(self, live: Live) -> Delta:
        """The end of a sequence whose hidden states were wanted: they go to its group, and no token comes out."""
        group = live.group
        num_averaged = len(group.submission.prompt_token_ids) if group.submission.pooling == "mean" else 1
        group.embedding = np.asarray(live.pooled, np.float32) / num_averaged
        live.num_sampled += 1
        return Delta(live.index, "", (), finish_reason=FinishReason.STOP.value)

    def _delta(self, live: Live, token_id: int, result: StepResult, place: int) -> Delta:
        """The token as text and log-probabilities, and whether the sequence ends with it."""
        text, finish, reason = push(live, token_id)
        logprobs = None
        if live.params.logprobs is not None:
            assert result.logprobs is not None
            logprobs = (self._logprobs(result.logprobs, place, live.params.logprobs),)
        return Delta(live.index, text, (token_id,), logprobs, finish and finish.value, reason)

    def _take_prompt_logprobs(self, live: Live, result: StepResult, place: int) -> None:
        found = result.prompt_logprobs.get(place)
        if found is None or live.group.prompt_logprobs is None:
            return
        num_top, scores = live.params.prompt_logprobs or 0, found.scores
        live.group.prompt_logprobs.extend(self._logprobs(scores, i, num_top) for i in range(len(scores.ids)))

    def _logprobs(self, scores: Scores, i: int, num_top: int) -> TokenLogprobs:
        return token_logprobs(self.tokenizer, scores.ids[i], scores.logprobs[i], scores.ranks[i], num_top)

    def _fail_row(self, live: Live, error: Exception) -> RowResult:
        """End this request, and only this one."""
        self.metrics.requests.labels("error").inc()
        self._updates.append(Update(live.request_id, None, error=error))
        live.ended = True
        return RowResult(live.sequence_id, 0, FinishReason.ABORT)

    def _is_structured(self, plan: StepPlan) -> bool:
        """Whether a row samples within a grammar, so that the step's sampling must wait for the tokens before it."""
        if not self._num_structured:
            return False
        return any(row.samples and self._live[row.sequence_id].grammar is not None for row in plan.rows)

    def _sample_deferred(self) -> None:
        """Sample the step whose forward pass runs, now that the tokens before it are known."""
        plan = self._device.deferred
        if plan is None:
            return
        started = time.perf_counter()
        masks = {place: mask for place, row in enumerate(plan.rows) if (mask := self._mask(row)) is not None}
        self.metrics.step_time.labels("mask").inc(time.perf_counter() - started)
        self._device.sample(masks)

    def _mask(self, row: Row) -> np.ndarray | None:
        """The tokens that a row's grammar allows, int32 [1, words], if it has one; a fault ends its request alone."""
        live = self._live[row.sequence_id]
        if live.grammar is None or live.ended or not row.samples:
            return None
        mask = np.empty((1, self._grammars.num_words), np.int32)
        try:
            live.grammar.fill(mask)
        except RequestError as error:
            live.fault = error
            return None
        return mask

    def _observe_token(self, live: Live, now_us: int) -> None:
        if live.num_sampled == 1:
            self.metrics.ttft.observe((now_us - live.group.arrival_us) / 1e6)
        else:
            self.metrics.itl.observe((now_us - live.last_token_us) / 1e6)
        live.last_token_us = now_us

    def _count_step(self, plan: StepPlan, *, wait: float, process: float) -> None:
        self.metrics.steps.inc()
        self.metrics.step_tokens.observe(plan.num_tokens)
        self.metrics.step_time.labels("wait").inc(wait)
        self.metrics.step_time.labels("process").inc(process)
        recompiles = self.runner.recompiles
        if recompiles > self._num_recompiles:
            self.metrics.recompiles.inc(recompiles - self._num_recompiles)
            self._num_recompiles = recompiles
