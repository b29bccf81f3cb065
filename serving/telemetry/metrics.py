"""The HTTP side's series, beside the engine's own on /metrics. Label values come from fixed sets."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class HttpMetrics:
    """Counts of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("route", "method", "status")
        self._requests = Counter(
            "pagedjax_http_requests", "Answered requests, by status class.", labels, registry=self.registry
        )
        self._in_flight = Gauge(
            "pagedjax_http_requests_in_flight", "Requests not answered yet.", registry=self.registry
        )
        self._errors = Counter(
            "pagedjax_http_errors", "Requests that failed, by error code.", ("route", "code"), registry=self.registry
        )
        self._seconds = Histogram(
            "pagedjax_http_request_seconds",
            "From the request's head to the answer's last byte.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )

    def watch(self, health: Callable[[], str], step_age_s: Callable[[], float]) -> None:
        """Show what these say whenever somebody asks."""
        up = Gauge("pagedjax_engine_up", "1 while the step loop is there and moves, else 0.", registry=self.registry)
        up.set_function(lambda: health() == "ok")
        age = Gauge(
            "pagedjax_engine_step_age_seconds", "Since the last step, while there is work.", registry=self.registry
        )
        age.set_function(step_age_s)

    def begin(self) -> None:
        self._in_flight.inc()

    def end(self, route: str, method: str, status: int, error: str | None, duration_s: float) -> None:
        """`status` 499 stands for a client that went before it had an answer."""
        self._in_flight.dec()
        self._requests.labels(route, method if method in METHODS else "other", f"{status // 100}xx").inc()
        self._seconds.labels(route).observe(duration_s)
        if error is not None:
            self._errors.labels(route, error).inc()
