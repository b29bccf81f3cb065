"""`python -m scripts.gpu_gate`: compile every kernel and program for GPUs that are not there; see `--help`.

The exit code is 0 if nothing is wrong, 1 if something is, and 3 where that isn't known: the wheels are missing, or the
time was up before the last case.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.gpu_gate import report
from scripts.gpu_gate.providers import PROVIDERS
from scripts.gpu_gate.target import TARGETS, cuda_directory, environment, missing

ROOT = Path(__file__).parent.parent.parent
CASE_TIMEOUT_S = 300
Run = Callable[[int], tuple[list[dict[str, Any]], str]]
UNKNOWN = 3


def main() -> int:
    options = _parser().parse_args()
    # So that the compiling process and its files go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.join:
        record = report.joined([json.loads(path.read_text()) for path in options.join])
    elif (lacking := missing()) is None:
        record = report.new_record(list(_results(options)), ROOT)
    else:
        print(f"gpu gate: it cannot run: {lacking}")
        return UNKNOWN
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.page:
        report.write_page(options.page, record["results"])
    print(report.summary(record["results"]))
    statuses = {result["status"] for result in record["results"]}
    return 1 if statuses & set(report.BAD) else UNKNOWN if "unfinished" in statuses else 0


def _results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of all groups, each shown as soon as it is known."""
    deadline = time.monotonic() + options.limit_s
    for provider in options.provider or PROVIDERS:
        for target in options.target or TARGETS:
            run = partial(_run_process, provider, target, options, deadline)
            for result in run_group(run, {"op": provider, "target": target}, lambda: time.monotonic() < deadline):
                print(report.line(result), flush=True)
                yield result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_gate", description=__doc__)
    parser.add_argument("--provider", action="append", choices=PROVIDERS, help="only this one; may be repeated")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this GPU; may be repeated")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases that have this in their name")
    parser.add_argument("--quick", action="store_true", help="the short gate: one shape or two of each op")
    parser.add_argument("--limit-s", type=float, default=3600, help="stop after so many seconds")
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="FILE", help="compile nothing, put these results together"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="rewrite the generated section of that page")
    return parser


def run_group(run: Run, group: dict[str, str], has_time: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Results of a provider's cases. After a crash or a hang that case has failed, and a new process does the rest.

    `run(n)` tries all cases but the first n, and gives the lines of `group` and how the process ended.
    """
    num_tried = 0
    while True:
        lines, ending = run(num_tried)
        finished = [line for line in lines if "status" in line]
        yield from finished
        if lines and "done" in lines[-1]:
            return
        begun = lines[-1] if lines and "status" not in lines[-1] else None
        identity = begun or {"backend": "-", "shape": "-"} | group
        yield identity | {"status": "crashed" if has_time() else "unfinished", "reasons": [ending]}
        # Without a case to blame, or without time, trying again would not end.
        if begun is None or not has_time():
            return
        num_tried += len(finished) + 1


def _run_process(
    provider: str, target: str, options: argparse.Namespace, deadline: float, num_tried: int
) -> tuple[list[dict[str, Any]], str]:
    """The lines that a process wrote, and how it ended."""
    with tempfile.TemporaryDirectory(prefix="gpu_gate_") as work:
        return _run_in(Path(work), provider, target, options, deadline, num_tried)


def _run_in(
    work: Path, provider: str, target: str, options: argparse.Namespace, deadline: float, num_tried: int
) -> tuple[list[dict[str, Any]], str]:
    cuda, dump, results = cuda_directory(), work / "dump", work / "results"
    assert cuda is not None, "`missing` has been asked"
    dump.mkdir()
    results.touch()
    command = [sys.executable, "-m", "scripts.gpu_gate.group", provider, target, "--skip", str(num_tried)]
    command += ["--ptxas", str(cuda / "bin" / "ptxas"), "--dump", str(dump), "--results", str(results)]
    command += ["--only", options.only, *(["--quick"] if options.quick else [])]
    log = work / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env=os.environ | environment(cuda, dump),
        )
        try:
            ending = _watch(process, results, deadline)
        finally:
            process.kill()
            process.wait()
    return [json.loads(line) for line in results.read_text().splitlines()], f"{ending}: {_last_line(log)}"


def _watch(process: subprocess.Popen[bytes], results: Path, deadline: float) -> str:
    """Wait for a process, but no longer than `CASE_TIMEOUT_S` for one case. Says how it ended."""
    size, since = 0, time.monotonic()
    while True:
        try:
            return f"the compiling process ended with {process.wait(timeout=0.2)}"
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if results.stat().st_size != size:
            size, since = results.stat().st_size, now
        if now - since > CASE_TIMEOUT_S or now > deadline:
            return "out of time" if now > deadline else f"no answer in {CASE_TIMEOUT_S} s"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it said nothing"


if __name__ == "__main__":
    sys.exit(main())
