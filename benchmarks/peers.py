"""Engines side by side in one run: the same requests to each in turn, several rounds, medians and ratios.

W1  one request at a time, 128 words in, 128 tokens out, 8 of them
W2  64 requests at once, 32 to 512 words in, 128 tokens out (W2@16: 16 requests)
W3  Poisson arrivals for 60 s, 32 to 512 words in, 16 to 128 tokens out (W3@2: 2 requests/s)
W4  64 requests at once with a common prefix of 512 words, 32 words of their own, 64 tokens out

W3 is sustained where, in the second half minute, as many requests end as 0.97 of those that come, and their median TTFT
is at most 1.2 times the first half's.

Prompts are common words, temperature is 0 and lengths are forced. Each round has prompts of its own, equal for all
engines, so that no prefix cache answers from the round before. Figures move from machine to machine and hour to hour:
only ratios within one run compare engines. "other CPU" is what else ran: a round in which it is high counts little.

Example:
  python benchmarks/peers.py --engine pagedjax=http://127.0.0.1:8000 --engine vllm=http://127.0.0.1:8001 \\
      --hf-python ~/hf/bin/python --hf-model ~/smollm2-hf --openvino-python ~/ov/bin/python \\
      --openvino-model model.gguf --workloads W1,W2,W4,W3@2 --rounds 3
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from pagedjax.bench.client import LoadResult, Target, normalise_url, run_load, served_models
from pagedjax.bench.machine import (
    busy_cpu_seconds,
    cpu_seconds,
    origin,
    peak_memory_bytes,
)
from pagedjax.bench.metrics import Chunk, RequestRecord, Status, serve_figures
from pagedjax.bench.report import align, check_writable, plain, write_json
from pagedjax.bench.workload import BenchRequest, LengthRange, WorkloadConfig, arrival_times, synthetic
from pagedjax.core.errors import ConfigError

HERE = Path(__file__).parent
W3_SECONDS = 60.0
LEAST_ENDED, MOST_GROWTH = 0.97, 1.2
TIMEOUT_S = 900.0
# What the table shows and the ratios compare: (figure, statistic within it, heading, better is more).
COLUMNS = (
    ("output_tokens_per_s", None, "out tok/s", True),
    ("requests_per_s", None, "req/s", True),
    ("ttft_ms", "p50", "TTFT p50", False),
    ("ttft_ms", "p99", "TTFT p99", False),
    ("itl_ms", "p50", "ITL p50", False),
    ("itl_ms", "p99", "ITL p99", False),
    ("tpot_ms", "mean", "TPOT", False),
    ("e2e_ms", "p99", "E2E p99", False),
)


class Workload(NamedTuple):
    name: str
    requests: tuple[BenchRequest, ...]
    max_concurrency: int | None = None


def make_workload(name: str, seed: int, limit: int | None = None) -> Workload:
    """The workload of that name, as the head of this file says; `limit` keeps the first requests only."""
    kind, _, parameter = name.partition("@")
    concurrency = None
    if kind == "W1":
        requests, concurrency = _burst(8, LengthRange(128, 128), 128, seed), 1
    elif kind == "W2":
        requests = _burst(int(parameter or 64), LengthRange(32, 512), 128, seed)
    elif kind == "W3":
        requests = _poisson(float(parameter or 1), seed)
    elif kind == "W4":
        requests = _burst(64, LengthRange(32, 32), 64, seed, prefix_len=512)
    else:
        raise ConfigError(f"--workloads: {name} is none of W1, W2, W3, W4")
    return Workload(name, requests[:limit], concurrency)


def _burst(
    num: int, input_len: LengthRange, output_len: int, seed: int, prefix_len: int = 0
) -> tuple[BenchRequest, ...]:
    output = LengthRange(output_len, output_len)
    return synthetic(
        WorkloadConfig(num_prompts=num, input_len=input_len, output_len=output, prefix_len=prefix_len, seed=seed)
    )


def _poisson(rate: float, seed: int) -> tuple[BenchRequest, ...]:
    due_s = [
        time_s for time_s in arrival_times(int(rate * W3_SECONDS * 3) + 30, rate, 1.0, seed) if time_s <= W3_SECONDS
    ]
    config = WorkloadConfig(
        num_prompts=max(1, len(due_s)),
        input_len=LengthRange(32, 512),
        output_len=LengthRange(16, 128),
        request_rate=rate,
        seed=seed,
    )
    return synthetic(config)


class Outcome(NamedTuple):
    """One workload on one engine. `cpu_s` is the engine's, where its process is known."""

    result: LoadResult
    peak_memory_bytes: int | None
    cpu_s: float | None


@dataclass(frozen=True, slots=True)
class Server:
    """A running server with OpenAI's API."""

    name: str
    target: Target
    pid: int | None

    def play(self, workload: Workload) -> Outcome:
        before_s = cpu_seconds(self.pid) if self.pid else None
        result = asyncio.run(run_load(self.target, workload.requests, max_concurrency=workload.max_concurrency))
        if result.interrupted:
            raise KeyboardInterrupt
        after_s = cpu_seconds(self.pid) if self.pid else None
        used_s = None if before_s is None or after_s is None else after_s - before_s
        return Outcome(result, peak_memory_bytes(self.pid) if self.pid else None, used_s)


class Offline:
    """An engine without a server, in a process of its own, fed line by line (hf_offline.py, openvino_offline.py)."""

    def __init__(self, name: str, python: str, script: str, arguments: Sequence[str], stack: ExitStack) -> None:
        self.name, self._script = name, script
        command = [python, str(HERE / script), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        stack.callback(self._process.wait)
        stack.callback(self._process.terminate)

    def play(self, workload: Workload) -> Outcome:
        before_s = cpu_seconds(self._process.pid)
        answer = self._ask(workload)
        after_s = cpu_seconds(self._process.pid)
        records = tuple(offline_record(entry) for entry in answer["records"])
        used_s = None if before_s is None or after_s is None else after_s - before_s
        return Outcome(
            LoadResult(records, max(answer["wall_s"], 1e-9), False, 0.0), answer["peak_memory_bytes"], used_s
        )

    def _ask(self, workload: Workload) -> dict[str, Any]:
        requests = [{"due_s": r.due_s, "prompt": r.prompt, "max_tokens": r.max_tokens} for r in workload.requests]
        line = json.dumps({"requests": requests, "max_concurrency": workload.max_concurrency})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self._process.stdout.readline()
        if not answer:
            raise ConfigError(
                f"{self.name} ended with code {self._process.wait()}; try benchmarks/{self._script} by hand"
            )
        parsed: dict[str, Any] = json.loads(answer)
        return parsed


Engine = Server | Offline


def offline_record(entry: dict[str, Any]) -> RequestRecord:
    """An offline engine's account of a request as the client would have recorded it."""
    times_s = entry["token_times_s"]
    return RequestRecord(
        due_s=entry["due_s"],
        start_s=entry["start_s"],
        end_s=times_s[-1] if times_s else entry["start_s"],
        chunks=tuple(Chunk(time_s, 1, 1) for time_s in times_s),
        prompt_len=entry["prompt_len"],
        output_len=len(times_s),
        finish_reason="length",
        status=Status.FAILED if entry["error"] else Status.OK,
        error=entry["error"],
    )


def warm_up(engine: Engine) -> None:
    """A few short requests, one by one and together."""
    random = Random("warm-up")
    for num, concurrency in ((2, 1), (4, None)):
        requests = _burst(num, LengthRange(24, 40), 8, random.randrange(1 << 30))
        engine.play(Workload("warm-up", requests, concurrency))


def measure(engine: Engine, workload: Workload, round_index: int) -> dict[str, Any]:
    """One row of the results."""
    busy_s = busy_cpu_seconds()
    outcome = engine.play(workload)
    figures = serve_figures(outcome.result.records, outcome.result.wall_s)
    total_s = None if busy_s is None else (busy_cpu_seconds() or busy_s) - busy_s
    other_s = (
        None if total_s is None or outcome.cpu_s is None else total_s - outcome.cpu_s - outcome.result.client_cpu_s
    )
    return {
        "engine": engine.name,
        "workload": workload.name,
        "round": round_index,
        "figures": plain(figures),
        "sustained": sustained(outcome.result.records) if workload.name.startswith("W3") else None,
        "wanted_output_tokens": sum(request.max_tokens for request in workload.requests),
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "engine_cpu_s": outcome.cpu_s,
        "client_cpu_s": outcome.result.client_cpu_s,
        "other_cpu_s": other_s,
    }


def sustained(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Whether an engine kept up with arrivals over W3_SECONDS, and by what figures."""
    half_s = W3_SECONDS / 2
    ok = [record for record in records if record.status is Status.OK]
    num_due = sum(record.due_s >= half_s for record in records)
    num_ended = sum(half_s <= record.end_s < W3_SECONDS for record in ok)
    halves = [[record.ttft_s for record in ok if (record.due_s >= half_s) is late] for late in (False, True)]
    if not num_due or not all(halves):
        return {"ended_of_due": 0.0, "ttft_growth": None, "holds": False}
    ended, growth = num_ended / num_due, statistics.median(halves[1]) / statistics.median(halves[0])
    return {"ended_of_due": ended, "ttft_growth": growth, "holds": ended >= LEAST_ENDED and growth <= MOST_GROWTH}


def play_rounds(
    engines: Sequence[Engine],
    names: Sequence[str],
    *,
    rounds: int,
    seed: int,
    limit: int | None,
    rows: list[dict[str, Any]],
) -> None:
    """Append a row for each engine, workload and round to `rows`, as it comes. Engines take turns in going first."""
    for round_index in range(rounds):
        turn = round_index % len(engines)
        for name in names:
            workload = make_workload(name, seed + round_index, limit)
            for engine in (*engines[turn:], *engines[:turn]):
                rows.append(measure(engine, workload, round_index))
                print(progress(rows[-1]), file=sys.stderr, flush=True)


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """workload -> engine -> the median over rounds of each column, memory too."""
    grouped: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        grouped.setdefault(row["workload"], {}).setdefault(row["engine"], []).append(row)
    return {
        workload: {
            engine: {
                **{
                    heading: _median([_value(row, figure, part) for row in group])
                    for figure, part, heading, _ in COLUMNS
                },
                "failed": float(sum(row["figures"]["num_failed"] for row in group)),
                "memory MiB": _median([_mib(row["peak_memory_bytes"]) for row in group]),
                "other CPU s": _median([row["other_cpu_s"] for row in group]),
            }
            for engine, group in engines.items()
        }
        for workload, engines in grouped.items()
    }


def ratios(
    summary: dict[str, dict[str, dict[str, float | None]]], baseline: str
) -> dict[str, dict[str, dict[str, float]]]:
    """How many times better than `baseline` each engine is: above 1 is better, for rates and latencies alike."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for workload, engines in summary.items():
        for engine, values in engines.items():
            for _, _, heading, more_is_better in COLUMNS:
                mine, theirs = values[heading], engines.get(baseline, {}).get(heading)
                if mine and theirs:
                    ratio = mine / theirs if more_is_better else theirs / mine
                    result.setdefault(workload, {}).setdefault(engine, {})[heading] = ratio
    return result


def render(summary: dict[str, dict[str, dict[str, float | None]]], baseline: str) -> str:
    """Medians, with the ratio to the baseline's output tokens/s behind each."""
    against = ratios(summary, baseline)
    headings = [*(heading for _, _, heading, _ in COLUMNS), "failed", "memory MiB", "other CPU s"]
    rows = [("workload", "engine", *headings, f"x {baseline}")]
    for workload, engines in summary.items():
        for engine, values in engines.items():
            ratio = against.get(workload, {}).get(engine, {}).get("out tok/s")
            cells = ["-" if values[heading] is None else f"{values[heading]:.4g}" for heading in headings]
            rows.append((workload, engine, *cells, "-" if ratio is None else f"{ratio:.2f}"))
    return align(rows)


def progress(row: dict[str, Any]) -> str:
    figures = row["figures"]
    errors = "".join(f"; error x {count}: {message}" for message, count in figures["errors"])
    kept = row["sustained"]
    pace = "" if kept is None else "; sustained" if kept["holds"] else f"; not sustained: {kept}"
    return (
        f"round {row['round']} {row['workload']:>5} {row['engine']:<14} "
        f"{figures['output_tokens_per_s']:8.1f} out tok/s "
        f"TTFT {_p50_p99(figures['ttft_ms'])} ITL {_p50_p99(figures['itl_ms'])} "
        f"ok {figures['num_ok']} of {figures['num_ok'] + figures['num_failed']}{pace}{errors}"
    )


def _p50_p99(summary: dict[str, float] | None) -> str:
    return "-" if summary is None else f"{summary['p50']:.1f}/{summary['p99']:.1f} ms"


def _value(row: dict[str, Any], figure: str, part: str | None) -> float | None:
    value = row["figures"][figure]
    number: float | None = value if part is None or value is None else value[part]
    return number


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / (1 << 20)


def open_engines(args: argparse.Namespace, stack: ExitStack) -> list[Engine]:
    """The engines that the flags name, reachable. Raises ConfigError."""
    pids, models = dict(args.pid), dict(args.served_model)
    engines: list[Engine] = []
    for name, url in args.engine:
        base = normalise_url(url)
        model = models.pop(name, None) or asyncio.run(served_models(base))[0]
        pid = pids.pop(name, None)
        engines.append(Server(name, Target(url=base, model=model, timeout_s=TIMEOUT_S), int(pid) if pid else None))
    if pids or models:
        raise ConfigError(f"--pid or --served-model names no --engine: {', '.join([*pids, *models])}")
    if args.hf_python:
        if not args.hf_model:
            raise ConfigError("--hf-python needs --hf-model DIR")
        for mode in args.hf_modes.split(","):
            arguments = [args.hf_model, "--mode", mode, "--dtype", args.hf_dtype]
            engines.append(Offline(f"hf-{mode}", args.hf_python, "hf_offline.py", arguments, stack))
    if args.openvino_python:
        if not args.openvino_model:
            raise ConfigError("--openvino-python needs --openvino-model FILE")
        engines.append(Offline("openvino", args.openvino_python, "openvino_offline.py", [args.openvino_model], stack))
    if not engines:
        raise ConfigError("give at least one --engine NAME=URL, --hf-python or --openvino-python")
    if args.baseline and args.baseline not in {engine.name for engine in engines}:
        raise ConfigError(f"--baseline {args.baseline} is none of {', '.join(engine.name for engine in engines)}")
    return engines


def named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", type=named, action="append", default=[], metavar="NAME=URL", help="a running server; repeatable")
    add(
        "--pid",
        type=named,
        action="append",
        default=[],
        metavar="NAME=PID",
        help="its process, for memory and CPU time",
    )
    add(
        "--served-model", type=named, action="append", default=[], metavar="NAME=ID", help="default: the first it lists"
    )
    add("--hf-python", metavar="PATH", help="Python with torch and transformers; adds them as engines")
    add("--hf-model", metavar="DIR", help="the model in Hugging Face's format")
    add("--hf-modes", default="static,continuous", metavar="MODES", help="(default: %(default)s)")
    add("--hf-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: %(default)s)")
    add("--openvino-python", metavar="PATH", help="Python with openvino-genai; adds it as an engine, in bfloat16")
    add("--openvino-model", metavar="FILE", help="GGUF file, or the model in OpenVINO's format")
    add("--workloads", default="W1,W2,W4,W3@1,W3@2", metavar="LIST", help="(default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--limit", type=int, metavar="N", help="only the first N requests of each workload, to try things out")
    add("--baseline", metavar="NAME", help="what ratios compare with (default: the last engine)")
    add("--note", default="", help="kept in the results: engines' versions and flags")
    add("--json", type=Path, default=HERE / "results" / "peers.json", metavar="FILE", help="(default: %(default)s)")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    names = args.workloads.split(",")
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    with ExitStack() as stack:
        try:
            check_writable(args.json)
            for name in names:
                make_workload(name, args.seed)
            engines = open_engines(args, stack)
            for engine in engines:
                warm_up(engine)
            play_rounds(engines, names, rounds=args.rounds, seed=args.seed, limit=args.limit, rows=rows)
        except (ConfigError, ValueError) as error:
            print(f"peers: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted: the figures cover what had finished", file=sys.stderr)
    if not rows:
        return 130
    summary, baseline = medians(rows), args.baseline or engines[-1].name
    write_json(
        args.json,
        {
            "schema": "pagedjax.peers/1",
            **origin(__file__),
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "duration_s": round(time.monotonic() - begin, 1),
            "note": args.note,
            "baseline": baseline,
            "medians": summary,
            "ratios": ratios(summary, baseline),
            "rows": rows,
        },
    )
    print(render(summary, baseline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
