"""`bench latency`: how long one batch takes from start to end, through `pagedjax.LLM`."""

import argparse
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from tqdm import tqdm

from pagedjax.bench.machine import device_peak_bytes, own_peak_memory_bytes
from pagedjax.bench.metrics import summarise
from pagedjax.bench.options import settings, symbols
from pagedjax.bench.plot import check_plot, plot_latency
from pagedjax.bench.report import LatencyFigures, Memory, check_writable, make_report
from pagedjax.bench.throughput import generate
from pagedjax.bench.workload import BenchRequest, LengthRange, WorkloadConfig, synthetic


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Measure, draw the picture if asked, and give the report. Raises ConfigError and RequestError."""
    from pagedjax import LLM

    if args.plot:
        check_plot(args.plot)
        check_writable(args.plot)
    batches = [_batch(args, index) for index in range(args.num_iters_warmup + args.num_iters)]
    llm = LLM(model=args.model, **dict(args.engine))
    for batch in batches[: args.num_iters_warmup]:
        generate(llm, batch)
    iterations_ms, interrupted = time_batches(lambda batch: generate(llm, batch), batches[args.num_iters_warmup :])
    figures = _figures(args, iterations_ms)
    if args.plot:
        plot_latency(args.plot, iterations_ms, f"{args.model}: batch of {args.batch_size}")
    return make_report(
        "latency",
        figures,
        command=command,
        settings=settings(args),
        memory=Memory(own_peak_memory_bytes(), device_peak_bytes()),
        interrupted=interrupted,
    )


def time_batches(
    generate_batch: Callable[[Sequence[BenchRequest]], object], batches: Sequence[Sequence[BenchRequest]]
) -> tuple[list[float], bool]:
    """Milliseconds of each batch, and whether Ctrl-C ended it early (raised again if none is finished)."""
    iterations_ms: list[float] = []
    try:
        for batch in tqdm(batches, unit="batch", disable=None, leave=False):
            begin = perf_counter()
            generate_batch(batch)
            iterations_ms.append((perf_counter() - begin) * 1e3)
    except KeyboardInterrupt:
        if not iterations_ms:
            raise
        return iterations_ms, True
    return iterations_ms, False


def _batch(args: argparse.Namespace, index: int) -> tuple[BenchRequest, ...]:
    """Each iteration has prompts of its own, or the prefix cache would answer all but the first."""
    config = WorkloadConfig(
        num_prompts=args.batch_size,
        input_len=LengthRange(args.input_len, args.input_len),
        output_len=LengthRange(args.output_len, args.output_len),
        symbols=symbols(args),
        seed=args.seed * 1_000_003 + index,
    )
    return synthetic(config)


def _figures(args: argparse.Namespace, iterations_ms: Sequence[float]) -> LatencyFigures:
    summary = summarise(iterations_ms)
    assert summary is not None  # time_batches gives at least one
    return LatencyFigures(
        batch_size=args.batch_size,
        input_len=args.input_len,
        output_len=args.output_len,
        output_tokens_per_s=args.batch_size * args.output_len / (summary.mean / 1e3),
        latency_ms=summary,
        iterations_ms=tuple(iterations_ms),
    )
