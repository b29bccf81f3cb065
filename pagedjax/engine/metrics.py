"""What the engine counts, in Prometheus' conventions: a fold over the scheduler's effects and the runner's results.

Gauges are read from the scheduler's state when somebody asks, so they cost the step loop nothing.
"""

from collections.abc import Callable, Iterator

import jax
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pagedjax.core.plan import Tier
from pagedjax.core.request import FinishReason
from pagedjax.core.state import State
from pagedjax.core.tiers import pool_of
from pagedjax.engine.bulk_histogram import BulkHistogram
from pagedjax.engine.tenant_metrics import TenantMetrics

_LATENCY_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
_SWITCH_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_OUTCOMES = (*(reason.value for reason in FinishReason), "timeout", "refused")
# Of a step, as `pagedjax_step_time_seconds` calls them.
_PHASES = ("schedule", "dispatch", "mask", "wait", "process")
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class EngineMetrics:
    """The counters and histograms of one engine, in a registry of their own."""

    def __init__(self, state: Callable[[], State | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StateGauges(state))
        self.registry.register(_DeviceMemory())
        ProcessCollector(registry=self.registry)
        self.requests = self._counter("pagedjax_requests", "Ended sequences (n a request), by outcome.", "outcome")
        for outcome in _OUTCOMES:
            self.requests.labels(outcome)  # so that the first one counts in a rate
        self.prompt_tokens = self._counter("pagedjax_prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("pagedjax_generation_tokens", "Tokens sampled or forced, and kept.")
        self.jump_forward_tokens = self._counter(
            "pagedjax_jump_forward_tokens", "Those of them that a grammar forced, without a step each."
        )
        self.cached_tokens = self._counter("pagedjax_prefix_cache_hit_tokens", "Tokens taken from the prefix cache.")
        self.queried_tokens = self._counter("pagedjax_prefix_cache_query_tokens", "Prompt tokens looked up in it.")
        self.preemptions = self._counter("pagedjax_preemption_count", "Preemptions.", "reason", "method")
        self.recomputed_tokens = self._counter("pagedjax_recomputed_tokens", "Tokens lost to preemptions.")
        self.swap_bytes = self._counter("pagedjax_swap_bytes", "Moved between tiers.", "tier", "direction")
        self.parked_blocks = self._counter("pagedjax_parked_blocks", "Kept in a lower tier, copied or not.", "copy")
        self.swap_failures = self._counter("pagedjax_swap_failures", "Transfers that failed.", "tier", "direction")
        self.discarded_tokens = self._counter("pagedjax_discarded_tokens", "Sampled behind a late stop or abort.")
        self.faulty_rows = self._counter("pagedjax_faulty_rows", "Rows whose logits were not finite.")
        self.recompiles = self._counter("pagedjax_recompiles", "Programs compiled after warm-up.")
        self.step_failures = self._counter("pagedjax_step_failures", "Steps that lost the device's cache.")
        self.steps = self._counter("pagedjax_steps", "Steps done.")
        self.step_tokens = self._histogram("pagedjax_step_tokens", "Tokens in a step.", _TOKENS)
        step_time = self._counter("pagedjax_step_time_seconds", "Time of the step loop, by phase.", "phase")
        # Found once: to look a label up takes three times as long as to count.
        self.step_time = {phase: step_time.labels(phase) for phase in _PHASES}
        self.queue_time = self._histogram("pagedjax_request_wait_time_seconds", "Arrival to first step.", _LATENCY_S)
        self.tenants = TenantMetrics(self.registry, state, _LATENCY_S)
        self.state_save_time = self._histogram(
            "pagedjax_state_save_time_seconds", "Blocks gathered to blocks in their tier.", _SWITCH_S
        )
        self.context_switch_time = self._histogram(
            "pagedjax_context_switch_time_seconds",
            "Decision to preempt by rank to another's first row.",
            _SWITCH_S,
        )
        self.ttft = self._histogram("pagedjax_time_to_first_token_seconds", "Arrival to first token.", _LATENCY_S)
        self.itl = BulkHistogram(
            "pagedjax_inter_token_latency_seconds", "Between two steps' tokens of a sequence.", _TOKEN_S
        )
        self.registry.register(self.itl)
        self.e2e = self._histogram("pagedjax_request_latency_seconds", "Arrival to last token.", _LATENCY_S)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)


class _StateGauges(Collector):
    def __init__(self, state: Callable[[], State | None]) -> None:
        self._state = state

    def collect(self) -> Iterator[GaugeMetricFamily]:
        state = self._state()
        if state is None:
            return
        yield GaugeMetricFamily("pagedjax_requests_waiting", "Sequences in line.", len(state.waiting))
        yield GaugeMetricFamily("pagedjax_waiting_tokens", "Tokens of sequences in line.", state.waiting.num_tokens)
        yield GaugeMetricFamily("pagedjax_requests_running", "Sequences running.", len(state.running))
        yield GaugeMetricFamily("pagedjax_steps_in_flight", "Steps planned and not done.", len(state.in_flight))
        yield GaugeMetricFamily("pagedjax_transfers_in_flight", "Swaps under way.", len(state.tiers.transfers))
        blocks = GaugeMetricFamily("pagedjax_kv_blocks", "KV blocks by tier and state.", labels=["tier", "state"])
        usage = GaugeMetricFamily("pagedjax_kv_cache_usage_ratio", "Share of the tier that is held.", labels=["tier"])
        for tier in Tier:
            pool = state.pool if tier is Tier.DEVICE else pool_of(state.tiers, tier)
            if pool.num_blocks:
                for name, count in (("held", pool.counts), ("idle", pool.idle), ("clean", pool.clean)):
                    blocks.add_metric([tier, name], len(count))
                usage.add_metric([tier], len(pool.counts) / pool.num_blocks)
        yield blocks
        yield usage


class _DeviceMemory(Collector):
    """What the accelerator's allocator tells; CPUs tell nothing."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        stats = jax.local_devices()[0].memory_stats() or {}
        for key, name in (("bytes_in_use", "in_use"), ("peak_bytes_in_use", "peak"), ("bytes_limit", "limit")):
            if key in stats:
                yield GaugeMetricFamily(f"pagedjax_device_memory_{name}_bytes", "Device memory.", stats[key])
