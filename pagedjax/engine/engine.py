"""The step loop's body: events in, effects carried out.

The engine owns the only mutable things: the latest State, the token table, the detokenizers and the runner. It turns
what callers and the device say into events, folds them with `update`, and runs the effects. One step stays in flight:
step n + 1 is planned and dispatched before the ids of step n are read.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import RequestError
from pagedjax.core.plan import Row, RowResult, StepPlan
from pagedjax.core.prefix import hash_block, root_hash
from pagedjax.core.request import FinishReason, SamplingParams
from pagedjax.core.scheduler import init, refusal, update
from pagedjax.core.state import Aborted, Arrived, Effect, Event, Finish, Preempt, Reject, RunStep, StepDone, StepDue
from pagedjax.core.tenants import DEFAULT_TENANT
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.detokenizer import Detokenizer
from pagedjax.engine.metrics import EngineMetrics
from pagedjax.engine.outputs import Delta, EngineError, TokenLogprobs, Update, token_logprobs
from pagedjax.engine.submission import Submission, check_queue, seed_for, submission
from pagedjax.engine.tokenizer import Tokenizer
from pagedjax.runtime.results import StepHandle, StepResult
from pagedjax.runtime.runner import Runner
from pagedjax.runtime.sampler import Scores


@dataclass(slots=True)
class _Live:
    """A sequence that has not finished: what the shell must remember of it beside its tokens."""

    sequence_id: int
    index: int
    group: "_Group"
    params: SamplingParams
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    last_hash: bytes | None
    num_sampled: int = 0
    last_token_us: int = 0
    started: bool = False
    ended: bool = False


@dataclass(slots=True)
class _Group:
    """A request: its `n` sequences."""

    submission: Submission
    arrival_us: int
    members: dict[int, _Live] = field(default_factory=dict)
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


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
    ) -> None:
        self.config = config
        self.runner = runner
        self.tokenizer = tokenizer
        self.state = init(scheduler)
        self.metrics = EngineMetrics(lambda: self.state)
        self._now_us = now_us or (lambda: time.monotonic_ns() // 1000)
        self._groups: dict[str, _Group] = {}
        self._live: dict[int, _Live] = {}
        self._handles: deque[StepHandle] = deque()
        self._next_sequence_id = 0
        self._num_recompiles = runner.recompiles

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        preemptible: bool = True,
    ) -> Submission:
        """Check and tokenise a request; safe on any thread. Raises RequestError."""
        return submission(
            self.tokenizer,
            self.state.config,
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            preemptible=preemptible,
        )

    def check(self, requests: Sequence[Submission]) -> None:
        """Raise RequestError if one of the requests would be refused as things are, or all together for ever.

        Safe on any thread.
        """
        check_queue(requests, self.state.config)
        for request in requests:
            refused = refusal(self.state, request.for_scheduler(0))
            if refused is not None:
                self.metrics.requests.labels("refused").inc()
                raise RequestError(refused.message, param="prompt", code=refused.code)

    def add(self, request: Submission) -> None:
        """Queue a request. Raises RequestError, and leaves nothing behind, if it can never run or the queue is full."""
        if request.request_id in self._groups:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        group = _Group(request, self._now_us())
        self._groups[request.request_id] = group
        try:
            for index in range(request.params.n):
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
        """Drop every request and wait for the steps in flight."""
        for request_id in list(self._groups):
            self.abort(request_id)
        while self._handles:
            self.step()

    def step(self) -> list[Update]:
        """Plan and dispatch what may be in flight, wait for the oldest step, and give what it brought.

        What the device raises ends the engine: the cache is lost with it. Every later call raises too.
        """
        if len(self._handles) < len(self.state.in_flight):
            raise EngineError("a step failed to start, and this engine cannot go on: make a new one")
        self._dispatch()
        if not self._handles:
            return []
        started = time.perf_counter()
        result = self.runner.collect(self._handles[0])
        collected = time.perf_counter()
        plan = self.state.in_flight[0]
        now_us = self._now_us()
        updates: list[Update] = []
        results = tuple(self._take_row(row, result, place, now_us, updates) for place, row in enumerate(plan.rows))
        processed = time.perf_counter()
        self._handles.popleft()
        self._send(StepDone(plan.plan_id, results, self._now_us()))
        for failed in [u.request_id for u in updates if u.error is not None]:
            self.abort(failed)
        self.metrics.generation_tokens.inc(sum(u.delta is not None for u in updates))
        self._count_step(plan, wait=collected - started, process=processed - collected)
        return updates

    def _dispatch(self) -> None:
        while len(self.state.in_flight) < self.state.config.max_steps_in_flight:
            num_in_flight = len(self.state.in_flight)
            started = time.perf_counter()
            self._send(StepDue(self._now_us()))
            self.metrics.step_time.labels("schedule").inc(time.perf_counter() - started)
            if len(self.state.in_flight) == num_in_flight:
                return

    def _send(self, event: Event) -> None:
        self.state, effects = update(self.state, event)
        self._carry_out(effects)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case RunStep(plan):
                    self._run(plan)
                case Preempt(sequence_id, num_lost_tokens):
                    self.runner.release(sequence_id)
                    self.metrics.preemptions.inc()
                    self.metrics.recomputed_tokens.inc(num_lost_tokens)
                case Finish(sequence_id):
                    self.runner.release(sequence_id)
                    self.runner.tokens.drop(sequence_id)
                    self._forget(self._live.pop(sequence_id))
                case Reject(sequence_id, code, message):
                    self.runner.tokens.drop(sequence_id)
                    self._forget(self._live.pop(sequence_id))
                    self.metrics.requests.labels("refused").inc()
                    raise RequestError(message, param="prompt", code=code)

    def _forget(self, live: _Live) -> None:
        group, request_id = live.group, live.group.submission.request_id
        del group.members[live.sequence_id]
        # An aborted request is gone from there, and another may have its id by now.
        if not group.members and self._groups.get(request_id) is group:
            del self._groups[request_id]

    def _run(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        now_us = self._now_us()
        for row in plan.rows:
            live = self._live[row.sequence_id]
            if not live.started:
                self._count_start(live, row, now_us)
        self._handles.append(self.runner.dispatch(plan))
        self.metrics.step_time.labels("dispatch").inc(time.perf_counter() - started)

    def _count_start(self, live: _Live, row: Row, now_us: int) -> None:
        """A sequence's first row starts behind what the prefix cache had of its prompt."""
        live.started = True
        group, prompt_len = live.group, len(live.group.submission.prompt_token_ids)
        self.metrics.queried_tokens.inc(prompt_len)
        self.metrics.cached_tokens.inc(row.start)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = row.start
            self.metrics.queue_time.observe((now_us - group.arrival_us) / 1e6)
            self.metrics.prompt_tokens.inc(prompt_len)

    def _add_sequence(self, group: _Group, index: int) -> None:
        request, sequence_id = group.submission, self._next_sequence_id
        self._next_sequence_id += 1
        params = request.params
        if index > 0 and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        # Every prompt token must be computed to be scored, so such a sequence takes nothing from the prefix cache.
        hashes = request.block_hashes if params.prompt_logprobs is None else ()
        eos = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
        live = _Live(
            sequence_id,
            index,
            group,
            params,
            eos | frozenset(params.stop_token_ids or ()),
            self._detokenizer(params),
            (hashes[-1] if hashes else root_hash(request.tenant)) if params.prompt_logprobs is None else None,
        )
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        self.runner.tokens.add(
            sequence_id,
            request.prompt_token_ids,
            params,
            seed=seed_for(params, index, self.config.seed, sequence_id),
            stop_token_ids=live.stop_ids,
        )
        self._live[sequence_id] = group.members[sequence_id] = live
        self._send(Arrived(request.for_scheduler(sequence_id), hashes, group.arrival_us))

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            self.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=tuple(params.stop or ()),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _take_row(self, row: Row, result: StepResult, place: int, now_us: int, updates: list[Update]) -> RowResult:
        """One row's outcome: the token is appended, told to the caller and judged for a stop."""
        live = self._live[row.sequence_id]
        if live.ended:
            self.metrics.discarded_tokens.inc(row.samples)
            return RowResult(row.sequence_id, 0)
        self._take_prompt_logprobs(live, result, place)
        if not row.samples:
            return RowResult(row.sequence_id, 0)
        token_id = int(result.ids[place])
        if result.faulty[place]:
            return self._fail_row(live, updates)
        self.runner.tokens.append(row.sequence_id, token_id)
        live.num_sampled += 1
        delta = self._delta(live, token_id, result, place)
        self._observe_token(live, now_us)
        updates.append(
            Update(
                live.group.submission.request_id,
                delta,
                live.group.num_cached_tokens or 0,
                live.group.prompt_logprobs,
            )
        )
        if delta.finish_reason is not None:
            live.ended = True
            self.metrics.requests.labels(delta.finish_reason).inc()
            self.metrics.e2e.observe((now_us - live.group.arrival_us) / 1e6)
        return RowResult(row.sequence_id, 1, delta.finish_reason, self._new_hash(live))

    def _delta(self, live: _Live, token_id: int, result: StepResult, place: int) -> Delta:
        """The token as text and log-probabilities, and whether the sequence ends with it."""
        params, finish = live.params, None
        reason: int | str | None = None
        is_stop = token_id in live.stop_ids and live.num_sampled > params.min_tokens
        text = "" if is_stop and not params.include_stop_str_in_output else live.detokenizer.push((token_id,))
        if is_stop:
            finish = FinishReason.STOP
            reason = token_id if token_id in (params.stop_token_ids or ()) else None
        elif live.detokenizer.stopped is not None:
            finish, reason = FinishReason.STOP, live.detokenizer.stopped
        elif live.num_sampled == params.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            text += live.detokenizer.finish()
        logprobs = None
        if params.logprobs is not None:
            assert result.logprobs is not None
            logprobs = (self._logprobs(result.logprobs, place, params.logprobs),)
        return Delta(live.index, text, (token_id,), logprobs, finish and finish.value, reason)

    def _take_prompt_logprobs(self, live: _Live, result: StepResult, place: int) -> None:
        found = result.prompt_logprobs.get(place)
        if found is None or live.group.prompt_logprobs is None:
            return
        num_top, scores = live.params.prompt_logprobs or 0, found.scores
        live.group.prompt_logprobs.extend(self._logprobs(scores, i, num_top) for i in range(len(scores.ids)))

    def _logprobs(self, scores: Scores, i: int, num_top: int) -> TokenLogprobs:
        return token_logprobs(self.tokenizer, scores.ids[i], scores.logprobs[i], scores.ranks[i], num_top)

    def _fail_row(self, live: _Live, updates: list[Update]) -> RowResult:
        """The logits were not finite: end this request, and only this one."""
        self.metrics.faulty_rows.inc()
        self.metrics.requests.labels("error").inc()
        request_id = live.group.submission.request_id
        error = EngineError("the model gave logits that are not finite for this request")
        updates.append(Update(request_id, None, error=error))
        live.ended = True
        return RowResult(live.sequence_id, 0, FinishReason.ABORT)

    def _new_hash(self, live: _Live) -> tuple[bytes, ...]:
        """The name of the block that the newest token completes, if it completes one."""
        if live.last_hash is None:
            return ()
        entry, block_size = self.runner.tokens.get(live.sequence_id), self.state.config.block_size
        if entry.length % block_size:
            return ()
        block = entry.ids[entry.length - block_size : entry.length]
        live.last_hash = hash_block(live.last_hash, block.astype("<i4").tobytes())
        return (live.last_hash,)

    def _observe_token(self, live: _Live, now_us: int) -> None:
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
