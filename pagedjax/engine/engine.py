"""The step loop's body: events in, effects carried out.

The engine owns the only mutable things: the latest State, the token table, the detokenizers and the runner. It turns
what callers and the device say into events, folds them with `update`, and runs the effects. One step stays in flight:
step n + 1 is planned and dispatched before the ids of step n are read.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pagedjax.core.arriving import refusal, refused_param
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Effect, Finish, Preempt, Reject, RunStep
from pagedjax.core.errors import RequestError
from pagedjax.core.events import Aborted, Arrived, Event, StepDone, StepDue
from pagedjax.core.plan import Row, StepPlan
from pagedjax.core.request import CompletionOutput, FinishReason, SamplingParams
from pagedjax.core.scheduler import init, update
from pagedjax.core.tenants import DEFAULT_TENANT
from pagedjax.engine.beams import make_beams
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.detokenizer import Detokenizer
from pagedjax.engine.device import Device
from pagedjax.engine.grammar import Grammars
from pagedjax.engine.live import Group, Live
from pagedjax.engine.lives import Lives
from pagedjax.engine.metrics import EngineMetrics
from pagedjax.engine.outputs import EngineError, Update
from pagedjax.engine.profiling import Profiler
from pagedjax.engine.record import Recorder
from pagedjax.engine.rows import Rows
from pagedjax.engine.step_history import StepHistory
from pagedjax.engine.submission import Pooling, Submission, check_queue, seed_for, submission
from pagedjax.engine.tokenizer import Tokenizer
from pagedjax.engine.watch import Watch
from pagedjax.runtime.runner import Runner

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
        self.lives = Lives()
        self.steps = StepHistory()
        self.profiler = Profiler()
        self._now_us = now_us or (lambda: time.monotonic_ns() // 1000)
        self._groups: dict[str, Group] = {}
        self._unstarted: deque[Group] = (
            deque()
        )  # by arrival, where waiting has a limit; some have started or gone since
        self._live: dict[int, Live] = {}
        self._grammars = Grammars(tokenizer)
        self._num_structured = 0
        self._device = Device(runner, self.metrics, self._now_us)
        self._next_sequence_id = 0
        self._watch = Watch(self.metrics, lambda: self.state, self._now_us, runner.recompiles)
        self._rows = Rows(
            self._live,
            runner.tokens,
            tokenizer,
            self.metrics,
            self._watch,
            self._new_sequence_id,
            scheduler.block_size,
        )

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
        return self.with_grammar(request)

    def with_grammar(self, request: Submission) -> Submission:
        """The request with its grammar compiled, if it has one; safe on any thread. Raises RequestError."""
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
        if self.config.queue_timeout_s:
            self._unstarted.append(group)
        try:
            # Beams come of one sequence.
            for index in range(1 if request.params.beam_width else request.params.num_samples):
                self._add_sequence(group, index)
        except RequestError:
            self.abort(request.request_id)
            raise

    def abort(self, request_id: str, outcome: str = "abort") -> None:
        """Drop a request; its sequences leave by the last step in flight that contains them. Ignores unknown ids.

        `outcome` is what the metrics call it: abort or timeout."""
        group = self._groups.pop(request_id, None)
        for live in list(group.members.values()) if group else ():
            if not live.ended:
                live.ended = True
                self.metrics.requests.labels(outcome).inc()
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
        self._expire()
        self._dispatch()
        if self._device.num_in_flight:
            self._collect()
        else:
            self._end_transfers(_IDLE_WAIT_S)
        updates, self._rows.updates = self._rows.updates, []
        for failed in [u.request_id for u in updates if u.error is not None]:
            self.abort(failed)
        return updates

    def _expire(self) -> None:
        """End the requests that have waited too long for their first step. Whoever has started may be parked longer."""
        if not self._unstarted:
            return
        limit_s = self.config.queue_timeout_s
        latest_us = self._now_us() - int(limit_s * 1e6)
        while self._unstarted and (self._unstarted[0].has_left_line or self._unstarted[0].arrival_us <= latest_us):
            group = self._unstarted.popleft()
            request_id = group.submission.request_id
            if group.has_left_line or self._groups.get(request_id) is not group:
                continue
            self.abort(request_id, "timeout")
            message = f"the request waited {limit_s:g} s for its first step (--queue-timeout-s); try again later"
            error = RequestError(message, code="queue_timeout")
            self._rows.updates.append(Update(request_id, None, error=error))

    def _dispatch(self) -> None:
        while len(self.state.in_flight) < self.state.config.max_steps_in_flight:
            num_in_flight = len(self.state.in_flight)
            started = time.perf_counter()
            self._send(StepDue(self._now_us()))
            self.metrics.step_time["schedule"].inc(time.perf_counter() - started)
            self._watch.planned(self.state.running, self.state.now_us)
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
        results = self._rows.take(plan.rows, result, now_us)
        chosen = self._rows.choose_beams(now_us)
        if chosen:
            results = tuple([chosen.pop(row.sequence_id, row) for row in results])
        choices = tuple(chosen.values())
        self.metrics.generation_tokens.inc(sum([row.num_accepted for row in (*results, *choices)]))
        self._sample_deferred()
        processed = time.perf_counter()
        self._send(StepDone(plan.plan_id, results, self._now_us(), choices))
        recompiles = self.runner.recompiles
        self._watch.step(plan, wait=collected - started, process=processed - collected, recompiles=recompiles)

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
        before = self.state
        self.state, effects = self._update(before, event)
        self.lives.see(before, event, self.state, effects)
        self.steps.see(event, self.state, effects)
        if effects:
            self._carry_out(effects)

    def _carry_out(self, effects: tuple[Effect, ...]) -> None:
        if any(isinstance(effect, Preempt) for effect in effects):
            self._watch.parked(effects)
        for effect in effects:
            match effect:
                case RunStep(plan):
                    self._watch.rows_start(plan, self._live)
                    self._device.start(plan, defers_sampling=self._is_structured(plan))
                    if self._device.num_in_flight == 1:
                        self._sample_deferred()
                case Preempt():
                    self.runner.release(effect.sequence_id)
                    self._watch.preempted(self._live[effect.sequence_id], effect)
                case Finish(sequence_id, reason):
                    self.runner.release(sequence_id)
                    self.runner.tokens.drop(sequence_id)
                    self._watch.finished(sequence_id)
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
            self._rows.updates.append(Update(request_id, None, error=error))
        del group.members[live.sequence_id]
        # An aborted request is gone from there, and another may have its id by now.
        if not group.members and self._groups.get(request_id) is group:
            del self._groups[request_id]

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
        arriving = request.for_scheduler(sequence_id, fork_of)
        self.lives.begin(request.request_id, arriving, group.arrival_us)
        self._send(Arrived(arriving, hashes, group.arrival_us))

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
        self.metrics.step_time["mask"].inc(time.perf_counter() - started)
        self._device.sample(masks)

    def _mask(self, row: Row) -> np.ndarray | None:
        """The tokens that a row's grammar allows, int32 [1, words], if it has one; a fault ends its request alone."""
        live = self._live[row.sequence_id]
        if live.grammar is None or live.ended or not row.samples or self._rows.is_known(row):
            return None
        mask = np.empty((1, self._grammars.num_words), np.int32)
        try:
            live.grammar.fill(mask)
        except RequestError as error:
            live.fault = error
            return None
        return mask
