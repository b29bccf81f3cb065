"""Series by tenant. Callers name tenants, so the number of labels is bounded: whoever comes later is "other"."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pagedjax.core.state import State

MAX_LABELS = 64
OTHER = "other"


class TenantMetrics:
    """Mutable; fed by the engine's thread, read by any."""

    def __init__(
        self, registry: CollectorRegistry, state: Callable[[], State | None], buckets: tuple[float, ...]
    ) -> None:
        self._labels: dict[str, str] = {}
        self._refused = Counter(
            "pagedjax_tenant_requests_refused", "Requests that were not queued.", ["tenant"], registry=registry
        )
        self._wait_time = Histogram(
            "pagedjax_tenant_wait_time_seconds",
            "Arrival to first step.",
            ["tenant"],
            buckets=buckets,
            registry=registry,
        )
        registry.register(_FromState(state, self.label))

    def label(self, tenant: str) -> str:
        """The tenant's name for the first MAX_LABELS of them, and for the others one in common."""
        if tenant not in self._labels and len(self._labels) >= MAX_LABELS:
            return OTHER
        return self._labels.setdefault(tenant, tenant)

    def count_refused(self, tenant: str) -> None:
        self._refused.labels(self.label(tenant)).inc()

    def observe_wait(self, tenant: str, wait_s: float) -> None:
        self._wait_time.labels(self.label(tenant)).observe(wait_s)


class _FromState(Collector):
    """What the scheduler's state tells, read when somebody asks.

    Service is refunded for tokens that are thrown away, but what Prometheus has seen of a counter must not fall: the
    most that was seen stands until the tenant has passed it.
    """

    def __init__(self, state: Callable[[], State | None], label: Callable[[str], str]) -> None:
        self._state, self._label = state, label
        self._seen: dict[str, int] = {}

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        state = self._state()
        service = CounterMetricFamily(
            "pagedjax_tenant_service_tokens", "Prompt tokens, and sampled ones twice.", labels=["tenant"]
        )
        running = GaugeMetricFamily("pagedjax_tenant_requests_running", "Sequences running.", labels=["tenant"])
        waiting = GaugeMetricFamily("pagedjax_tenant_requests_waiting", "Sequences in line.", labels=["tenant"])
        if state is not None:
            accounts = state.tenants.accounts
            for label, num_tokens in self._sums((name, one.service) for name, one in accounts.items()).items():
                self._seen[label] = max(num_tokens, self._seen.get(label, 0))
            queues = state.waiting.queues
            for family, counts in (
                (service, self._seen),
                (running, self._sums((s.request.tenant, 1) for s in state.running)),
                (waiting, self._sums((name, queue.num_requests) for name, queue in queues.items())),
            ):
                for label in sorted(self._seen.keys() | counts.keys()):
                    family.add_metric([label], counts.get(label, 0))
        yield from (service, running, waiting)

    def _sums(self, counts: Iterable[tuple[str, int]]) -> Mapping[str, int]:
        sums: Tally[str] = Tally()
        for name, count in counts:
            sums[self._label(name)] += count
        return sums
