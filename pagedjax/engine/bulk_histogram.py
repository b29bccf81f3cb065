"""A Prometheus histogram that takes many equal values at once.

Of the tokens that a step brings, nearly all come equally long after the ones before. The client library's own takes one
value at a time, under two locks: 40 us for 64 rows.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import Histogram, Metric
from prometheus_client.registry import Collector


class BulkHistogram(Collector):
    """Fed by one thread, read by any. `bounds` are the buckets' upper ends, which belong to them, in order."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        # The client's own, always empty: it knows how one is shown, and when it was created.
        self._empty = Histogram(name, text, buckets=bounds, registry=None)

    def observe(self, value: float, count: int) -> None:
        """Take in a value that was seen `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def describe(self) -> Iterable[Metric]:
        return self._empty.describe()

    def collect(self) -> Iterable[Metric]:
        (shown,) = self._empty.collect()
        counts = list(accumulate(self._counts))
        values = [*counts, counts[-1], self._sum]
        shown.samples[: len(values)] = [sample._replace(value=v) for sample, v in zip(shown.samples, values)]
        return [shown]
