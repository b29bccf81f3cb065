"""Where a figure was measured: machine, versions, commit, and what a process tree used. Linux's /proc, else unknown."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pagedjax import __version__

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "aiohttp")
_KIB = 1024


def origin(script: str) -> dict[str, Any]:
    """Where the figures of the running benchmark come from: its command line, commit, machine, versions and the load
    beside it. Ask before the runs, during which the tree may change; `script` is its file."""
    arguments = [Path(one).name if one.startswith("/") else one for one in sys.argv]
    return {
        "command": shlex.join(["python", *arguments]),
        "git": git_commit(Path(script).parent),
        "machine": describe_machine(),
        "versions": versions(),
        "load_average": os.getloadavg()[0],
    }


def describe_machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes and system; no names that identify the machine."""
    return {
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of Python, of this project and of the packages that are installed."""
    found = {"python": platform.python_version(), "pagedjax": __version__}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def git_commit(directory: Path) -> dict[str, Any] | None:
    """The commit of the checkout that tracks `directory`'s files, and whether they differ from it; None outside one."""
    if not _git(directory, "ls-files", "."):
        return None
    commit = _git(directory, "rev-parse", "HEAD")
    dirty = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "dirty": bool(dirty)}


def peak_memory_bytes(pid: int) -> int | None:
    """Peak resident memory of a process and its living descendants: the sum of each one's own peak."""
    peaks = [peak for process in process_tree(pid) if (peak := _peak_rss_bytes(process)) is not None]
    return sum(peaks) if peaks else None


def own_peak_memory_bytes() -> int | None:
    """Peak resident memory of this process, without children."""
    return _peak_rss_bytes(os.getpid())


def cpu_seconds(pid: int) -> float | None:
    """Processor time of a process and its living descendants."""
    ticks = [ticks for process in process_tree(pid) if (ticks := _cpu_ticks(process)) is not None]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def busy_cpu_seconds() -> float | None:
    """Processor time of the whole machine since its start, idle time left out."""
    with suppress(OSError, ValueError):
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:8]]
        user, nice, system, _idle, _iowait, irq, softirq = fields
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return None


def process_tree(pid: int) -> list[int]:
    """`pid` and its descendants that are alive; empty where /proc is missing or `pid` is gone."""
    children: dict[int, list[int]] = {}
    for process, parent in _parents():
        children.setdefault(parent, []).append(process)
    tree = [pid] if Path(f"/proc/{pid}").exists() else []
    for process in tree:
        tree.extend(children.get(process, ()))
    return tree


def device_peak_bytes() -> int | None:
    """Peak memory in use on this process's JAX devices together; None where the backend does not tell (CPU)."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    return sum(peaks) if peaks else None


def _parents() -> Iterator[tuple[int, int]]:
    with suppress(OSError):
        for entry in os.listdir("/proc"):
            fields = _stat_fields(int(entry)) if entry.isdigit() else None
            if fields:
                yield int(entry), int(fields[1])


def _stat_fields(pid: int) -> list[str] | None:
    # The command's name stands in brackets and may hold blanks and brackets; the fields begin after the last one.
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return None


def _cpu_ticks(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[11]) + int(fields[12]) if fields else None


def _peak_rss_bytes(pid: int) -> int | None:
    with suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * _KIB
    return None


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory_bytes() -> int | None:
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
