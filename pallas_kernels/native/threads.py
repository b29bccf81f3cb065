"""How many threads the kernels use."""

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 20


def usable_cpus() -> int:
    """PAGEDJAX_NUM_THREADS, else the CPUs that this process may run on, no more than its container's share of time.

    Raises ValueError for a PAGEDJAX_NUM_THREADS that is no positive number.
    """
    wish = os.environ.get("PAGEDJAX_NUM_THREADS")
    if wish:
        if not wish.isdecimal() or not 1 <= int(wish) <= 1024:
            raise ValueError(f"PAGEDJAX_NUM_THREADS={wish} is not a number from 1 to 1024")
        return int(wish)
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, cpu_quota()))


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Whole CPUs' worth of time that control groups (version 2) leave this process; a large number without a limit."""
    try:
        path = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return NO_LIMIT
    # A limit may stand at any level; a container sees its own group as the root.
    folder = cgroups / path.strip("/")
    return min(_limit(group / "cpu.max") for group in (folder, *folder.parents) if group.is_relative_to(cgroups))


def _limit(file: Path) -> int:
    try:
        quota, period = file.read_text().split()
        return NO_LIMIT if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return NO_LIMIT
