"""Jobs for the Mosaic GPU interpreter, each batch of them in a process with a time limit, since a deadlock hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def interpret(jobs: dict[str, dict[str, Any]], limit_s: float, quiet: bool = False) -> dict[str, dict[str, Any]]:
    """Each job's result by its name: see `interpret.py`. Jobs that the process did not come to are not there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.pallas_kernels.mosaic.interpret"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = "".join(json.dumps(job) + "\n" for job in jobs.values())
    try:
        said, _ = process.communicate(lines, timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    if not quiet:
        print(said)  # pytest shows it where a test fails
    found = [json.loads(line.removeprefix("RESULT ")) for line in said.splitlines() if line.startswith("RESULT ")]
    return dict(zip(jobs, found))
