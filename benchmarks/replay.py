"""Recorded traffic through the scheduler, with a cost model in the device's place.

    python benchmarks/replay.py azure_llm_2023_conv.csv azure_llm_2023_code.csv mooncake_conversation.jsonl \
        --out benchmarks/results/replay.json

Each trace is replayed with ample memory, and at twice that rate with a pool too small for it. It must show: everybody
finishes, nobody is overtaken by a later request of its priority, nobody is preempted twice within a chunk of
tokens. A trace without shared prefixes also gives the share of held memory that is wasted and, from its requests up to
2,048 tokens, how the memory compares with reservation and with padding; so does a made-up mix of short requests.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.bench.machine import origin
from pagedjax.bench.simulated import sim_requests
from pagedjax.bench.traces import read_trace
from pagedjax.core.config import SchedulerConfig
from pagedjax.simulator import H200_LIKE, SimReport, SimRequest, simulate
from pagedjax.simulator.checks import (
    contiguous_concurrency,
    memory_beside_padding,
    most_overtaken,
    repreempted,
    saturated_concurrency,
)
from pagedjax.simulator.report import Summary
from pagedjax.simulator.workload import Traffic, mix

PADDED_LEN = 2048
AMPLE_BLOCKS, TIGHT_BLOCKS = 50_000, 4_096
# Prompt + output / 2 is 150 tokens in the mean of requests; over time it is more, since long outputs live longer.
SHORT = Traffic(
    num_requests=2000,
    rate=200,
    prompt_median=61,
    output_median=61,
    prompt_sigma=1.0,
    output_sigma=1.0,
    max_prompt_len=1000,
    max_output_len=1000,
)
Figure = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="Azure's .csv or Mooncake's .jsonl")
    parser.add_argument("--limit", type=int, help="replay only the first so many requests of each trace")
    parser.add_argument("--time-scale", type=float, default=0.5, help="multiply arrival times by this (default 0.5)")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    report = origin(__file__)
    figures = []
    for figure in runs(args.traces, args.limit, args.time_scale):
        figures.append(figure)
        print(json.dumps(figure), flush=True)
    if args.out:
        report |= {"cost_model": H200_LIKE.source, "figures": figures}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def runs(traces: list[Path], limit: int | None, time_scale: float) -> Iterator[Figure]:
    yield {"trace": "short mix", **memory(mix(SHORT))}
    for path in traces:
        arrivals = read_trace(path, limit)
        longest = max(arrival.input_len + arrival.output_len for arrival in arrivals)
        for num_blocks, scale in ((AMPLE_BLOCKS, time_scale), (max(TIGHT_BLOCKS, -(-longest // 16)), time_scale / 2)):
            config = configure(num_blocks, max_model_len=longest)
            requests = sim_requests(arrivals, block_size=16, max_model_len=longest, time_scale=scale)
            yield {"trace": path.name, "time_scale": scale, **replay(config, requests)}
        if arrivals[0].hash_ids is None:
            requests = sim_requests(arrivals, block_size=16, max_model_len=PADDED_LEN, time_scale=0.0)
            yield {"trace": f"{path.name}, requests up to {PADDED_LEN} tokens, all at once", **memory(requests)}


def configure(num_blocks: int, max_model_len: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        max_num_seqs=512,
        max_num_batched_tokens=4096,
        max_model_len=max_model_len,
        max_queued_requests=10**6,
        max_queued_tokens=10**9,
    )


def replay(config: SchedulerConfig, requests: tuple[SimRequest, ...]) -> Figure:
    started = time.perf_counter()
    report = simulate(config, requests, H200_LIKE)
    return {
        "num_blocks": config.num_blocks,
        "num_requests": len(requests),
        "num_finished": len(report.finished),
        "most_overtaken": most_overtaken(report),
        "preemptions": report.preemptions_by("reason"),
        "preempted_again_within_a_chunk": len(repreempted(report, config.min_execution_chunk)),
        "waste_percent": percent(report.waste),
        "waste_until_computed_percent": percent(report.waste_until_computed),
        "computed_tokens": report.totals.computed_tokens,
        "recomputed_tokens": report.totals.recomputed_tokens,
        "cached_tokens": report.totals.cached_tokens,
        "mean_running": round(report.mean_running, 1),
        "virtual_s": round(report.end_us / 1e6, 1),
        "device_busy_percent": percent(report.totals.busy_us / report.end_us),
        "output_tokens_per_s": round(report.output_tokens_per_s, 1),
        "wait_ms": summary(report.wait_ms()),
        "ttft_ms": summary(report.ttft_ms()),
        "itl_ms": summary(report.itl_ms()),
        "e2e_ms": summary(report.e2e_ms()),
        "simulated_in_s": round(time.perf_counter() - started, 1),
    }


def memory(requests: tuple[SimRequest, ...]) -> Figure:
    """What paging saves under more load than fits."""
    report = simulate(configure(TIGHT_BLOCKS, PADDED_LEN), requests, H200_LIKE)
    return {"num_blocks": TIGHT_BLOCKS, "num_requests": len(requests), **memory_figures(report)}


def memory_figures(report: SimReport) -> Figure:
    paged, contiguous = saturated_concurrency(report), contiguous_concurrency(report, PADDED_LEN)
    return {
        "num_finished": len(report.finished),
        "mean_context": round(report.totals.planned_slot_us / report.totals.running_us, 1),
        "waste_percent": percent(report.waste),
        "waste_until_computed_percent": percent(report.waste_until_computed),
        "concurrency": round(paged, 1),
        "concurrency_by_reservation": contiguous,
        "concurrency_ratio": round(paged / contiguous, 2),
        "memory_beside_padding": round(memory_beside_padding(report, PADDED_LEN), 3),
    }


def summary(found: Summary | None) -> dict[str, float] | None:
    return found and {name: round(value, 2) for name, value in found._asdict().items()}


def percent(share: float) -> float:
    return round(100 * share, 3)


if __name__ == "__main__":
    main()
