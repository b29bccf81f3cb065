"""`python -m scripts.gpu_check --out DIR [--stand-in] [--part NAME …] [--limit-s 470]`.

The exit status is 0 if nothing failed. What is refused or skipped, with its reason, is no failure.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.gpu_check import report
from scripts.gpu_check.part import PARTS

ROOT = Path(__file__).parent.parent.parent
# What may lie beside the checkout: packages that the machine lacks (see docs/gpu-engine.md).
VENDOR = ROOT / "vendor"
# Until the first check begins: imports, and the device's start.
START_LIMIT_S = 60.0
# Together more than there is: what one part does not use, others have.
PART_LIMIT_S = {"parity": 150.0, "kernels": 110.0, "engine": 200.0, "goldens": 100.0, "torch_generate": 100.0}
OTHER_LIMIT_S = 60.0
# Of the whole time, for each part that is yet to come: those that hang leave the others something.
KEPT_S = 25.0
# A process that its driver does not let go is left behind.
KILL_S = 5.0
BAD = ("failed", "crashed", "hung", "out of time")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where gpu_check.json is written")
    parser.add_argument("--stand-in", action="store_true", help="tiny shapes on the CPU, to try the script itself")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be repeated")
    parser.add_argument("--limit-s", type=float, default=470.0, help="stop after so many seconds")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit_s
    results: list[dict[str, Any]] = []
    parts = options.part or PARTS
    for i, part in enumerate(parts):
        limit_s = options.limit_s if options.stand_in else PART_LIMIT_S.get(part, OTHER_LIMIT_S)
        left_s = deadline - time.monotonic()
        part_s = min(limit_s, share_s(left_s, len(parts) - i - 1))
        for result in run_part(part, stand_in=options.stand_in, deadline=time.monotonic() + part_s):
            results.append(result)
            print(report.line(result), flush=True)
            report.write(options.out / "gpu_check.json", results, stand_in=options.stand_in, root=ROOT)
    print(report.table(results))
    return int(any(result["status"] in BAD for result in results))


def share_s(left_s: float, num_to_come: int) -> float:
    """What a part may take of the time that is left: all but `KEPT_S` for each one to come, an equal share at least."""
    return max(left_s - KEPT_S * num_to_come, left_s / (num_to_come + 1))


def run_part(part: str, *, stand_in: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Results of a part's checks. After a crash or a hang, that check has failed and a new process does the rest."""
    num_tried = 0
    while True:
        if time.monotonic() >= deadline:
            yield {"part": part, "name": "the rest", "status": "out of time", "reason": "no time was left to start"}
            return
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as work:
            lines, problem = _run_process(part, num_tried, Path(work), stand_in, deadline)
        finished = [line for line in lines if "status" in line]
        yield from finished
        if problem is None:
            return
        began = lines[-1].get("began") if lines else None
        status = "hung" if problem.startswith("no answer") else "crashed"
        yield {"part": part, "name": began or "its start", "status": status, "reason": problem}
        num_tried += len(finished) + 1
        if began is None:  # nothing to leave out: another try would end alike
            return


def _run_process(
    part: str, skip: int, work: Path, stand_in: bool, deadline: float
) -> tuple[list[dict[str, Any]], str | None]:
    """The lines that a process wrote, and why it ended early, if it did."""
    results, log = work / "results", work / "log"
    results.touch()
    command = [sys.executable, "-m", "scripts.gpu_check.part", part, "--results", str(results), "--skip", str(skip)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *(["--stand-in"] if stand_in else [])],
            cwd=ROOT,
            env=environment(stand_in),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        problem = _watch(process, results, deadline)
    said = log.read_text(errors="replace").strip().splitlines()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return lines, None if problem is None else f"{problem}: {said[-1][:300] if said else 'it said nothing'}"


def environment(stand_in: bool) -> dict[str, str]:
    """This process's, with the checkout and what lies beside it to be imported from."""
    paths = [str(ROOT), *([str(VENDOR)] if VENDOR.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    here = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    return os.environ | here | ({"JAX_PLATFORMS": "cpu"} if stand_in else {})


def _watch(process: subprocess.Popen[bytes], results: Path, deadline: float) -> str | None:
    """Wait for a process, but not beyond the limit of the check that it is at. Says why it ended early."""
    size, since, limit_s = 0, time.monotonic(), START_LIMIT_S
    while True:
        try:
            status = process.wait(timeout=0.1)
            return None if status == 0 else f"the process ended with {status}"
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        text = results.read_text()
        if len(text) != size and text.endswith("\n"):
            size, since = len(text), now
            limit_s = json.loads(text.splitlines()[-1]).get("limit_s", START_LIMIT_S)
        if now - since > limit_s or now > deadline:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=KILL_S)
            return f"no answer in {limit_s:.0f} s" if now <= deadline else "no answer before all time was over"


if __name__ == "__main__":
    sys.exit(main())
