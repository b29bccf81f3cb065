"""`bench serve`: load on a server over HTTP."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from pagedjax.bench.client import (
    LoadResult,
    Target,
    import_aiohttp,
    normalise_url,
    run_load,
    served_device_peak_bytes,
    served_models,
)
from pagedjax.bench.machine import peak_memory_bytes
from pagedjax.bench.metrics import RequestRecord, ServeFigures, Status, serve_figures
from pagedjax.bench.options import DEFAULT_MODEL, settings, warmup_workload, workload
from pagedjax.bench.plot import check_plot, plot_serve
from pagedjax.bench.report import Memory, check_writable, make_report
from pagedjax.bench.server_process import serving
from pagedjax.bench.workload import BenchRequest
from pagedjax.core.errors import ConfigError


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Measure, draw the picture if asked, and give the report. Raises ConfigError."""
    import_aiohttp()
    if args.plot:
        check_plot(args.plot)
        check_writable(args.plot)
    requests, warmups = workload(args), warmup_workload(args)
    with ExitStack() as stack:
        url, pid = _server(args, stack)
        target = _target(args, url)
        _warm_up(target, warmups, args.max_concurrency)
        result = _measure(target, requests, args.max_concurrency)
        memory = Memory(peak_memory_bytes(pid) if pid else None, _device_peak(target))
    figures = serve_figures(result.records, result.wall_s, args.slo)
    if args.plot and result.records:
        plot_serve(args.plot, result.records, f"{target.model}: {_rates(figures)}")
    return make_report(
        "serve",
        figures,
        command=command,
        settings=settings(args) | {"model": target.model, "url": args.url},
        memory=memory,
        records=result.records,
        interrupted=result.interrupted,
        client=_client_cost(result, figures),
    )


def _server(args: argparse.Namespace, stack: ExitStack) -> tuple[str, int | None]:
    if args.url is not None:
        if args.engine:
            raise ConfigError("--engine sets up a server of our own; it does not go with --url")
        return normalise_url(args.url), args.server_pid
    if args.server_pid:
        raise ConfigError("--server-pid goes with --url")
    model = args.model or DEFAULT_MODEL
    print(f"starting a server for {model} …", file=sys.stderr)
    return stack.enter_context(serving(model, dict(args.engine), args.startup_timeout))


def _target(args: argparse.Namespace, url: str) -> Target:
    api_key = os.environ.get("OPENAI_API_KEY")
    model = args.model if args.url else None
    if model is None:
        models = asyncio.run(served_models(url, api_key))
        if not models:
            raise ConfigError(f"{url} lists no model; name one with --model")
        model = models[0]
    return Target(
        url=url,
        model=model,
        api=args.api,
        api_key=api_key,
        timeout_s=args.timeout,
        temperature=args.temperature,
        ignore_eos=not args.no_ignore_eos,
        extra_body=args.extra_body,
    )


def _warm_up(target: Target, requests: Sequence[BenchRequest], max_concurrency: int | None) -> None:
    if not requests:
        return
    result = asyncio.run(run_load(target, requests, max_concurrency=max_concurrency))
    if result.interrupted:
        raise KeyboardInterrupt
    if all(record.status is Status.FAILED for record in result.records):
        raise ConfigError(f"every warm-up request failed: {result.records[0].error}")


def _measure(target: Target, requests: Sequence[BenchRequest], max_concurrency: int | None) -> LoadResult:
    with tqdm(total=len(requests), unit="req", disable=None, leave=False) as bar:

        def count(record: RequestRecord) -> None:
            bar.update(record.status is not Status.INTERRUPTED)

        return asyncio.run(run_load(target, requests, max_concurrency=max_concurrency, on_record=count))


def _device_peak(target: Target) -> int | None:
    return asyncio.run(served_device_peak_bytes(target.url, target.api_key))


def _client_cost(result: LoadResult, figures: ServeFigures) -> dict[str, float | None]:
    """The client's own processor time, since it may share cores with the server."""
    tokens = figures.output_tokens
    return {
        "cpu_s": result.client_cpu_s,
        "cpu_us_per_output_token": result.client_cpu_s / tokens * 1e6 if tokens else None,
    }


def _rates(figures: ServeFigures) -> str:
    return f"{figures.num_ok} requests, {figures.output_tokens_per_s:.0f} output tokens/s"
