"""The report: one JSON document with everything needed to judge and repeat a figure, and a table of its main lines."""

import json
import os
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pagedjax.bench.machine import describe_machine, git_commit, versions
from pagedjax.bench.metrics import RequestRecord, ServeFigures, Summary
from pagedjax.core.errors import ConfigError

SCHEMA = "pagedjax.bench/1"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ThroughputFigures:
    """Offline generation of a whole workload at once."""

    num_requests: int
    wall_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """The same batch again and again: `latency_ms` is of whole iterations, in order in `iterations_ms`."""

    batch_size: int
    input_len: int
    output_len: int
    output_tokens_per_s: float
    latency_ms: Summary
    iterations_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks in bytes, since the process's start; None where it cannot be told."""

    host_peak_bytes: int | None
    device_peak_bytes: int | None


Figures = ServeFigures | ThroughputFigures | LatencyFigures


def make_report(
    mode: str,
    figures: Figures,
    *,
    command: Sequence[str],
    settings: dict[str, Any],
    memory: Memory,
    records: Sequence[RequestRecord] = (),
    **extra: Any,
) -> dict[str, Any]:
    """The JSON document of one run. `extra` adds top-level entries, plain JSON values."""
    return {
        "schema": SCHEMA,
        "mode": mode,
        "command": shlex.join(command),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_commit(Path(__file__).parent),
        "machine": describe_machine(),
        "versions": versions(),
        "settings": settings,
        "figures": plain(figures),
        "memory": plain(memory),
        **extra,
        "requests": [_request_entry(record) for record in records],
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write whole or not at all. Raises ConfigError when the file cannot be written."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(report, file, indent=1, allow_nan=False)
            file.write("\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Raise ConfigError now rather than after a long run."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: its folder must exist and be writable")


def render(report: dict[str, Any]) -> str:
    """The report's main lines as aligned plain text."""
    figures, memory = report["figures"], report["memory"]
    title = f"{report['mode']}  {report['settings'].get('model') or ''}".rstrip()
    parts = [
        title,
        "=" * len(title),
        align(_count_rows(report["mode"], figures, memory)),
        _summary_table(
            {name: values for name, values in figures.items() if name.endswith("_ms") and _is_summary(values)}
        ),
        *(f"error x {count}: {message}" for message, count in figures.get("errors", ())),
    ]
    return "\n".join(part for part in parts if part)


def align(rows: Iterable[Sequence[str]]) -> str:
    """Columns: the first flush left, the others flush right."""
    rows = [tuple(row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )


def plain(value: Any) -> Any:
    """JSON types only; summaries become objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(entry) for name, entry in value._asdict().items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in asdict(value)}
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    return value


def _request_entry(record: RequestRecord) -> dict[str, Any]:
    return {
        "status": str(record.status),
        "error": record.error,
        "finish_reason": record.finish_reason,
        "due_s": round(record.due_s, 6),
        "start_s": round(record.start_s, 6),
        "end_s": round(record.end_s, 6),
        "ttft_ms": round(record.ttft_s * 1e3, 3) if record.chunks else None,
        "prompt_len": record.prompt_len,
        "cached_len": record.cached_len,
        "output_len": record.output_len,
    }


def _count_rows(mode: str, figures: dict[str, Any], memory: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(label, form(figures[name])) for name, label, form in _ROWS[mode] if figures.get(name) is not None]
    for name, label in (
        ("host_peak_bytes", "peak host memory (MiB)"),
        ("device_peak_bytes", "peak device memory (MiB)"),
    ):
        if memory[name] is not None:
            rows.append((label, f"{memory[name] / _MIB:.0f}"))
    return rows


def _summary_table(summaries: dict[str, dict[str, float]]) -> str:
    if not summaries:
        return ""
    header = ("ms", *Summary._fields)
    rows = [
        (_LABELS[name], *(f"{values[field]:.2f}" for field in Summary._fields)) for name, values in summaries.items()
    ]
    return "\n" + align([header, *rows])


def _is_summary(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == set(Summary._fields)


_LABELS = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "e2e_ms": "E2E",
    "send_delay_ms": "send delay",
    "latency_ms": "latency",
}
_RATES = (
    ("requests_per_s", "requests/s", "{:.2f}".format),
    ("output_tokens_per_s", "output tokens/s", "{:.1f}".format),
    ("total_tokens_per_s", "total tokens/s", "{:.1f}".format),
)
_TOKENS = (
    ("wall_s", "duration (s)", "{:.2f}".format),
    ("input_tokens", "input tokens", str),
    ("cached_tokens", "  of these from the prefix cache", str),
    ("output_tokens", "output tokens", str),
)
_ROWS = {
    "serve": (
        ("num_ok", "requests finished", str),
        ("num_failed", "requests failed", str),
        ("num_interrupted", "requests interrupted", str),
        *_TOKENS,
        *_RATES,
        ("goodput_requests_per_s", "goodput (requests/s)", "{:.2f}".format),
        ("max_running", "most requests at once", str),
        ("tokens_per_chunk", "tokens per chunk", "{:.2f}".format),
    ),
    "throughput": (("num_requests", "requests", str), *_TOKENS, *_RATES),
    "latency": (
        ("batch_size", "batch size", str),
        ("input_len", "input length", str),
        ("output_len", "output length", str),
        ("output_tokens_per_s", "output tokens/s", "{:.1f}".format),
    ),
}
