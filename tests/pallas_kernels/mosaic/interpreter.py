"""Jobs for the Mosaic GPU interpreter, run one after another in a process that is ended when it gets stuck.

A deadlock in a kernel hangs for ever, so every job has a time limit: one that runs out ends the process.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
MARK = "RESULT "
# Compiling takes longer than what is compiled then runs.
HASTY_COMPILER = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def interpret(jobs: dict[str, dict[str, Any]], limit_s: float, quiet: bool = False) -> dict[str, dict[str, Any]]:
    """Each job's result by its name: see `interpret.py`. One that got stuck or ended the process, and those after it,
    have none.

    `limit_s` is a job's. What the process says is printed, unless `quiet`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.pallas_kernels.mosaic.interpret"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": HASTY_COMPILER},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    results: queue.Queue[dict[str, Any] | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, results, quiet))
    reader.start()
    found = {}
    try:
        process.stdin.write("".join(json.dumps(job) + "\n" for job in jobs.values()))
        process.stdin.close()
        with contextlib.suppress(queue.Empty):
            for name in jobs:
                if (result := results.get(timeout=limit_s)) is None:
                    break
                found[name] = result
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
    return found


def _read(lines: Any, results: queue.Queue[dict[str, Any] | None], quiet: bool) -> None:
    """Every result, and None once the process has ended."""
    for line in lines:
        if line.startswith(MARK):
            results.put(json.loads(line.removeprefix(MARK)))
        if not quiet:
            print(line, end="")
    results.put(None)
