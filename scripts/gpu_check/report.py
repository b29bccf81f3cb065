"""Results as a line each, as JSON, and as the short table that is printed last."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from pagedjax.bench.machine import git_commit, versions

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "torch", "transformers", "triton")


def line(result: dict[str, Any]) -> str:
    """One result for people."""
    said = _figures(result["figures"]) if "figures" in result else result["reason"].partition("\n")[0][:160]
    return f"{result['status']:<8} {result['part']}: {result['name']}: {said}"


def table(results: list[dict[str, Any]]) -> str:
    """What matters: the kernels' and the engine's figures, everything that failed, and how many did what."""
    rows = [line(r) for r in results if r["status"] == "ok" and r["part"] != "parity"]
    parity = [r for r in results if r["part"] == "parity" and r["status"] == "ok"]
    worst = max((r["figures"].get("error", 0.0) for r in parity), default=None)
    if worst is not None:
        rows.insert(0, f"ok       parity: {len(parity)} cases agree with the reference, largest error {worst:.1e}")
    bad = [line(r) for r in results if r["status"] not in ("ok", "refused", "skipped")]
    counts = Counter(r["status"] for r in results)
    return "\n".join(["", "== gpu check", *rows, *bad, ", ".join(f"{n} {status}" for status, n in counts.items())])


def write(path: Path, results: list[dict[str, Any]], *, stand_in: bool, root: Path) -> None:
    """Everything known so far, with what it was measured on."""
    record = {
        "command": " ".join(sys.argv),
        "stand_in": stand_in,
        "git": git_commit(root),
        "versions": versions(PACKAGES),
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def _figures(figures: dict[str, Any]) -> str:
    return "  ".join(f"{name} {_number(value)}" for name, value in figures.items())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
