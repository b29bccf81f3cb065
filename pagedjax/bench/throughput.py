"""`bench throughput`: a whole workload at once through `pagedjax.LLM`, without a server."""

import argparse
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from pagedjax.bench.machine import device_peak_bytes, own_peak_memory_bytes
from pagedjax.bench.options import settings, warmup_workload, workload
from pagedjax.bench.report import Memory, ThroughputFigures, make_report
from pagedjax.bench.workload import BenchRequest
from pagedjax.core.request import RequestOutput, SamplingParams


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Measure and give the report. Raises ConfigError and RequestError."""
    from pagedjax import LLM

    requests, warmups = workload(args), warmup_workload(args)
    llm = LLM(model=args.model, **dict(args.engine))
    if warmups:
        generate(llm, warmups)
    begin = perf_counter()
    outputs = generate(llm, requests, use_tqdm=sys.stderr.isatty())
    wall_s = perf_counter() - begin
    return make_report(
        "throughput",
        figures(outputs, wall_s),
        command=command,
        settings=settings(args),
        memory=Memory(own_peak_memory_bytes(), device_peak_bytes()),
    )


def generate(llm: Any, requests: Sequence[BenchRequest], *, use_tqdm: bool = False) -> list[RequestOutput]:
    """Greedy, at exactly the lengths that the requests ask for."""
    prompts = [request.prompt if isinstance(request.prompt, str) else list(request.prompt) for request in requests]
    params = [greedy(request.max_tokens) for request in requests]
    outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=use_tqdm)
    return outputs


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def figures(outputs: Sequence[RequestOutput], wall_s: float) -> ThroughputFigures:
    """Sum up what a run of `wall_s` seconds gave."""
    input_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return ThroughputFigures(
        num_requests=len(outputs),
        wall_s=wall_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        requests_per_s=len(outputs) / wall_s,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(input_tokens + output_tokens) / wall_s,
    )
