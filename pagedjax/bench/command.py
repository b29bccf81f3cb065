"""The command `pagedjax bench`: flags in, report out."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from pagedjax.bench.options import add_latency, add_serve, add_throughput
from pagedjax.bench.report import check_writable, render, write_json
from pagedjax.core.errors import ConfigError, RequestError

_MODES = {
    "throughput": (add_throughput, "tokens/s of a whole workload, offline through LLM"),
    "latency": (add_latency, "time of one batch, offline through LLM"),
    "serve": (add_serve, "load on an OpenAI-compatible server: TTFT, ITL, goodput"),
}
_USAGE_ERROR, _FAILED, _INTERRUPTED = 2, 1, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands; `run` does what the parsed arguments say."""
    modes = parser.add_subparsers(dest="bench_mode", required=True, metavar="MODE")
    for name, (add, summary) in _MODES.items():
        add(modes.add_parser(name, help=summary, description=f"Measure {summary}."))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pagedjax bench` with these arguments (default: the process's); its exit status."""
    parser = argparse.ArgumentParser(prog="pagedjax bench", description="Measure engines and servers.")
    add_arguments(parser)
    words = sys.argv[1:] if argv is None else argv
    return run(parser.parse_args(words), words)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """The exit status: 0 measured, 1 no request succeeded, 2 wrong arguments or nothing to measure, 130 Ctrl-C.

    `words` are the arguments as typed after `pagedjax bench`; the report names them.
    """
    try:
        if args.json:
            check_writable(args.json)
        mode = import_module(f"pagedjax.bench.{args.bench_mode}")
        report = mode.run(args, ["pagedjax", "bench", *words])
        if args.json:
            write_json(args.json, report)
    except (ConfigError, RequestError) as error:
        print(f"pagedjax bench: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted before there was anything to report", file=sys.stderr)
        return _INTERRUPTED
    print(render(report))
    return _status(report)


def _status(report: dict[str, Any]) -> int:
    if report.get("interrupted"):
        print("interrupted: the figures cover what had finished", file=sys.stderr)
        return _INTERRUPTED
    return _FAILED if report["figures"].get("num_ok") == 0 else 0
