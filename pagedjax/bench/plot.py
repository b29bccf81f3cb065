"""Pictures of a run: distributions of TTFT and ITL, and how many requests were in flight."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pagedjax.bench.metrics import RequestRecord, Status, timeline, token_gaps_s
from pagedjax.core.errors import ConfigError


def check_plot(path: Path) -> None:
    """Raise ConfigError when matplotlib is missing or cannot write this kind of file."""
    supported = _figure_class()(figsize=(1, 1)).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in supported:
        raise ConfigError(f"--plot {path}: the name must end in one of .{', .'.join(sorted(supported))}")


def plot_serve(path: Path, records: Sequence[RequestRecord], title: str) -> None:
    """TTFT and ITL as cumulative distributions, and the requests in flight over time."""
    figure = _figure_class()(figsize=(10, 7), layout="constrained")
    done = [record for record in records if record.status is Status.OK]
    axes = figure.subplot_mosaic([["ttft", "itl"], ["timeline", "timeline"]])
    _cdf(axes["ttft"], (record.ttft_s * 1e3 for record in done), "TTFT (ms)")
    _cdf(axes["itl"], (gap * 1e3 for record in done for gap in token_gaps_s(record)), "ITL (ms)")
    _draw_timeline(axes["timeline"], records)
    figure.suptitle(title)
    _save(figure, path)


def plot_latency(path: Path, iterations_ms: Sequence[float], title: str) -> None:
    """The latency of iterations as a cumulative distribution."""
    figure = _figure_class()(figsize=(6, 4), layout="constrained")
    _cdf(figure.subplots(), iterations_ms, "latency of a batch (ms)")
    figure.suptitle(title)
    _save(figure, path)


def _draw_timeline(axes: Any, records: Sequence[RequestRecord]) -> None:
    points = timeline(records)
    times = [time_s for time_s, _, _ in points]
    decoding = [decoding for _, _, decoding in points]
    running = [running for _, running, _ in points]
    axes.fill_between(times, running, step="post", alpha=0.35, label="waiting for the first token")
    axes.fill_between(times, decoding, step="post", alpha=0.8, label="decoding")
    axes.set_xlabel("time (s)")
    axes.set_ylabel("requests in flight")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")


def _cdf(axes: Any, values: Iterable[float], label: str) -> None:
    ordered = sorted(values)
    axes.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], drawstyle="steps-post")
    axes.set_xlabel(label)
    axes.set_ylabel("share")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _figure_class() -> Any:
    # The figure alone, without pyplot: no window system, no global state.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install 'pagedjax[bench]'") from error
    return Figure
