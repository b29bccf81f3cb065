"""What the engine counts of the effects that it carries out: starts, preemptions, switches, tokens, steps."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from pagedjax.core.effects import Effect, Preempt, SwapOut
from pagedjax.core.phases import Phase
from pagedjax.core.plan import Row, StepPlan
from pagedjax.core.state import Sequence, State
from pagedjax.engine.live import Live
from pagedjax.engine.metrics import EngineMetrics


class Watch:
    """Mutable; belongs to the engine's thread. A preemption by rank is decided when its victim is told to yield, and
    ends with the first row of whoever starts or resumes next."""

    def __init__(self, metrics: EngineMetrics, state: Callable[[], State], now_us: Callable[[], int], recompiles: int):
        self._metrics, self._state, self._now_us = metrics, state, now_us
        self._decided_us: dict[int, int] = {}
        self._switches_us: list[int] = []
        self._gaps_us: Counter[int] = Counter()  # between tokens, as the step that is collected shows them
        self._num_recompiles = recompiles

    def planned(self, running: Iterable[Sequence], now_us: int) -> None:
        """A step was planned, and some of these may have been told to yield."""
        for sequence in running:
            if sequence.phase is Phase.YIELDING:
                self._decided_us.setdefault(sequence.sequence_id, now_us)

    def finished(self, sequence_id: int) -> None:
        self._decided_us.pop(sequence_id, None)

    def parked(self, effects: tuple[Effect, ...]) -> None:
        """Count the blocks of the preempted that lower tiers keep: those copied now, and those that had a copy."""
        num_dirty = sum([len(effect.moves) for effect in effects if isinstance(effect, SwapOut)])
        parked = [self._state().tiers.parked.get(e.sequence_id) for e in effects if isinstance(e, Preempt)]
        num_kept = sum([len(one.copies) for one in parked if one is not None])
        self._metrics.parked_blocks.labels("dirty").inc(num_dirty)
        self._metrics.parked_blocks.labels("clean").inc(max(num_kept - num_dirty, 0))

    def preempted(self, live: Live, effect: Preempt) -> None:
        live.is_running = False
        self._metrics.preemptions.labels(effect.reason, effect.method).inc()
        self._metrics.recomputed_tokens.inc(effect.num_lost_tokens)
        decided_us = self._decided_us.pop(effect.sequence_id, self._state().now_us)
        if effect.reason not in ("memory", "failure"):
            self._switches_us.append(decided_us)

    def rows_start(self, plan: StepPlan, sequences: Mapping[int, Live]) -> None:
        """Count what starts or resumes with this step. Whoever does so profits from the oldest preemption by rank."""
        now_us = self._now_us()
        for row in plan.rows:
            live = sequences[row.sequence_id]
            if live.is_running:
                continue
            live.is_running = True
            if self._switches_us:
                self._metrics.context_switch_time.observe((now_us - self._switches_us.pop(0)) / 1e6)
            if not live.started:
                self._count_start(live, row, now_us)

    def _count_start(self, live: Live, row: Row, now_us: int) -> None:
        """A sequence's first row starts behind what the prefix cache had of its prompt."""
        live.started = True
        group, prompt_len = live.group, len(live.group.submission.prompt_token_ids)
        self._metrics.queried_tokens.inc(prompt_len)
        self._metrics.cached_tokens.inc(row.start)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = row.start
            wait_s = (now_us - group.arrival_us) / 1e6
            self._metrics.queue_time.observe(wait_s)
            self._metrics.tenants.observe_wait(group.submission.tenant, wait_s)
            self._metrics.prompt_tokens.inc(prompt_len)

    def tokens(self, live: Live, num_new: int, now_us: int) -> None:
        """A step has brought new tokens of a sequence."""
        if num_new > 1:
            self._metrics.jump_forward_tokens.inc(num_new - 1)
        if live.num_sampled == num_new:
            self._metrics.ttft.observe((now_us - live.group.arrival_us) / 1e6)
        else:
            self._gaps_us[now_us - live.last_token_us] += 1
        live.last_token_us = now_us

    def step(self, plan: StepPlan, *, wait: float, process: float, recompiles: int) -> None:
        for gap_us, count in self._gaps_us.items():
            self._metrics.itl.observe(gap_us / 1e6, count)
        self._gaps_us.clear()
        self._metrics.steps.inc()
        self._metrics.step_tokens.observe(plan.num_tokens)
        self._metrics.step_time["wait"].inc(wait)
        self._metrics.step_time["process"].inc(process)
        if recompiles > self._num_recompiles:
            self._metrics.recompiles.inc(recompiles - self._num_recompiles)
            self._num_recompiles = recompiles
