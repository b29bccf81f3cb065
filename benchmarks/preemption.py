"""What preemption costs and what it buys, on mixes of questions and batch jobs.

    python benchmarks/preemption.py --out benchmarks/results/preemption.json --plot docs/images/preemption.png
    python benchmarks/preemption.py --engine --out benchmarks/results/preemption_engine.json

Simulated (the scheduler itself, a cost model in the device's place):

* the committed mixes (`pagedjax/simulator/mixes.py`) at time slices of 10 to 500 ms in both modes, under each
  preset, and without preemption;
* one job that yields to a large question and resumes, by recomputation, by swap and as `auto` chooses, by its context.

`--engine` runs a small mix on the real engine and its real clock instead. Overhead is the share of the device's time
that preemption cost: tokens computed again, blocks copied. A switch is the time from the decision that somebody must
yield to the dispatch of the step with the first row of whom it was for; a save is the time from a gather to its
TransferDone.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedjax.bench.machine import origin
from pagedjax.core.config import PreemptionMethod, SchedulerConfig, num_blocks_for
from pagedjax.core.presets import PRESETS
from pagedjax.core.request import SamplingParams
from pagedjax.simulator import CPU_XLA, H200_LIKE, Link, SimReport, SimRequest, simulate
from pagedjax.simulator.checks import repreempted
from pagedjax.simulator.mixes import BATCH, CROWDED, EVERYDAY, INTERACTIVE, LONG_PROMPTS
from pagedjax.simulator.report import Summary, summarise
from pagedjax.simulator.workload import Traffic
from pagedjax.simulator.workload import mix as traffic

SLICES_MS = (10, 25, 50, 75, 100, 150, 200, 300, 500)
MODES = ("aggressive", "conservative")
MIXES = {"everyday": EVERYDAY, "crowded": CROWDED, "long prompts": LONG_PROMPTS}
METHODS: tuple[PreemptionMethod, ...] = ("recompute", "swap", "auto")
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
ENGINE_SLICES_MS = (10, 50, 150, 500)
# For a small model on a few cores: a step takes some tens of milliseconds.
ENGINE_TRAFFIC = (
    Traffic(num_requests=72, rate=9, prompt_median=16, output_median=4, priority=INTERACTIVE),
    Traffic(num_requests=20, rate=6, prompt_median=96, output_median=96, output_sigma=0.3, priority=BATCH, seed=1),
)
SLOWER_LINKS = {
    f"h200-like, {gb_per_s:g} GB/s": replace(H200_LIKE, host=Link(us_per_transfer=20, bytes_per_us=gb_per_s * 1e3))
    for gb_per_s in (6.5, 3)
}
COSTS = {"h200-like": H200_LIKE, **SLOWER_LINKS, "cpu-xla": CPU_XLA}
CHUNKS = {name: 256 if cost is CPU_XLA else 2048 for name, cost in COSTS.items()}
Figure = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="run the small mix on the real engine instead")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw the simulated figures")
    args = parser.parse_args()
    report = origin(__file__)
    if args.engine:
        report["engine"] = collect(engine_runs())
    else:
        report["cost_models"] = {name: cost.source for name, cost in COSTS.items()}
        report["mixes"] = {name: mix.about for name, mix in MIXES.items()}
        report["sweep"] = collect(sweep())
        report["swap_or_recompute"] = collect(swap_or_recompute())
        if args.plot:
            plot(args.plot, report)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def collect(figures: Iterator[Figure]) -> list[Figure]:
    found = []
    for figure in figures:
        found.append(figure)
        print(json.dumps(figure), flush=True)
    return found


# ---- time slices


def sweep() -> Iterator[Figure]:
    for name, mix in MIXES.items():
        requests = mix.requests()
        config = replace(mix.config, enable_preemption=False)
        yield {"mix": name, "mode": "off", **figures_of(simulate(config, requests, mix.cost))}
        for preset, policy in PRESETS.items():
            report = simulate(replace(mix.config, **policy), requests, mix.cost)
            yield {"mix": name, "mode": "preset", "preset": preset, **figures_of(report)}
        if mix is LONG_PROMPTS:
            shielded = [request._replace(preemptible=request.priority == INTERACTIVE) for request in requests]
            report = simulate(mix.config, shielded, mix.cost)
            yield {"mix": name, "mode": "documents are not preemptible", **figures_of(report)}
        for mode in MODES:
            for time_slice in SLICES_MS:
                config = replace(mix.config, preemption_mode=mode, time_slice=time_slice)
                report = simulate(config, requests, mix.cost)
                yield {"mix": name, "mode": mode, "time_slice": time_slice, **figures_of(report)}


def figures_of(report: SimReport) -> Figure:
    return {
        "num_finished": len(report.finished),
        "output_tokens_per_s": round(report.output_tokens_per_s, 1),
        "e2e_ms": rounded(report.e2e_ms()),
        "interactive_ttft_ms": of_class(report, INTERACTIVE, "ttft_us"),
        "interactive_e2e_ms": of_class(report, INTERACTIVE, "e2e_us"),
        "batch_e2e_ms": of_class(report, BATCH, "e2e_us"),
        "preemptions": report.preemptions_by("reason"),
        "methods": report.preemptions_by("method"),
        "preempted_again_within_a_chunk": len(repreempted(report, report.config.min_execution_chunk)),
        "recomputed_tokens": report.totals.recomputed_tokens,
        "swapped_mib": round(report.swapped_bytes(to_device=False) / 2**20, 1),
        "overhead_percent": round(100 * report.preemption_overhead, 2),
        "switch_ms": rounded(summarise((s.dispatched_us - s.decided_us) / 1e3 for s in report.switches)),
        "save_ms": rounded(summarise((t.end_us - t.start_us) / 1e3 for t in report.transfers if not t.to_device)),
    }


def of_class(report: SimReport, priority: int, name: str) -> dict[str, float] | None:
    outcomes = [outcome for outcome in report.finished if outcome.request.priority == priority]
    return rounded(summarise(getattr(outcome, name) / 1e3 for outcome in outcomes))


def rounded(found: Summary | None) -> dict[str, float] | None:
    return found and {name: round(value, 2) for name, value in found._asdict().items()}


# ---- swap or recompute


def swap_or_recompute() -> Iterator[Figure]:
    """What a job loses when it must yield all its blocks once, by its context and the method."""
    for name in COSTS:
        for context in CONTEXTS:
            reports = {method: yielding_job(name, context, method) for method in METHODS}
            e2e_us = {method: reports[method].outcomes[0].e2e_us for method in METHODS}
            yield {
                "cost": name,
                "context": context,
                "best": min(("recompute", "swap"), key=lambda method: e2e_us[method]),
                "auto_chooses": reports["auto"].preemptions[0].method,
                "auto_slower_percent": round(100 * (e2e_us["auto"] / min(e2e_us.values()) - 1), 2),
                "device_ms_lost": {method: report.totals.lost_us / 1e3 for method, report in reports.items()},
                "job_e2e_ms": {method: e2e_us[method] / 1e3 for method in METHODS},
                "save_ms": [(t.end_us - t.start_us) / 1e3 for t in reports["swap"].transfers if not t.to_device],
            }


def yielding_job(name: str, context: int, method: PreemptionMethod) -> SimReport:
    """A job that has sampled sixteen tokens when a question comes that needs the whole pool."""
    cost = COSTS[name]
    num_blocks = num_blocks_for(context + 64, 16)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        num_host_blocks=0 if method == "recompute" else num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNKS[name],
        max_model_len=num_blocks * 16,
        time_slice=1,
        preemption_method=method,
        swap_us_per_block=cost.swap_us_per_block(),
        recompute_us_per_token=cost.recompute_us_per_token(),
    )
    job = SimRequest(0, context, 32)
    asked_us = simulate(config, [job], cost).outcomes[0].token_us[15]
    question = SimRequest(asked_us, num_blocks * 16 - 1, 1, priority=INTERACTIVE)
    return simulate(config, [job, question], cost)


# ---- the real engine


def engine_runs() -> Iterator[Figure]:
    """Questions beside jobs on the bundled model: one engine after another on one runner, which stays compiled."""
    from pagedjax.engine.build import build_engine
    from pagedjax.engine.config import EngineConfig
    from pagedjax.engine.engine import Engine

    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 512, "num_gpu_blocks_override": 128}
    built = build_engine(EngineConfig(**limits, enable_prefix_caching=False))
    for mode, time_slice in (("off", None), *((mode, ms) for mode in MODES for ms in ENGINE_SLICES_MS)):
        policy = {"preemption_mode": mode, "time_slice": time_slice} if time_slice else {"enable_preemption": False}
        engine = Engine(built.config, replace(built.state.config, **policy), built.runner, built.tokenizer)
        yield {"mode": mode, "time_slice": time_slice, **engine_run(engine, traffic(*ENGINE_TRAFFIC))}


def engine_run(engine: Any, requests: Sequence[SimRequest]) -> Figure:
    """Submit the requests when they are due, and step until all are done."""
    start_s, num_submitted, e2e_ms = time.perf_counter(), 0, {}
    while num_submitted < len(requests) or engine.has_work:
        now_us = (time.perf_counter() - start_s) * 1e6
        while num_submitted < len(requests) and requests[num_submitted].arrival_us <= now_us:
            submit(engine, num_submitted, requests[num_submitted])
            num_submitted += 1
        if not engine.has_work:
            time.sleep((requests[num_submitted].arrival_us - now_us) / 1e6)
        for update in engine.step():
            if update.delta is not None and update.delta.finish_reason is not None:
                index = int(update.request_id)
                e2e_ms[index] = (time.perf_counter() - start_s) * 1e3 - requests[index].arrival_us / 1e3
    counted = [sample for metric in engine.metrics.registry.collect() for sample in metric.samples]
    return {
        "num_finished": len(e2e_ms),
        "output_tokens_per_s": round(sum(r.output_len for r in requests) / (time.perf_counter() - start_s), 1),
        "e2e_ms": rounded(summarise(e2e_ms.values())),
        "interactive_e2e_ms": rounded(summarise(e2e_ms[i] for i in e2e_ms if requests[i].priority == INTERACTIVE)),
        "batch_e2e_ms": rounded(summarise(e2e_ms[i] for i in e2e_ms if requests[i].priority == BATCH)),
        "preemptions": sum(sample.value for sample in counted if sample.name == "pagedjax_preemption_count_total"),
    }


def submit(engine: Any, index: int, request: SimRequest) -> None:
    params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
    token_ids = [1000 + (index * 7919 + position * 31) % 20_000 for position in range(request.prompt_len)]
    engine.add(engine.prepare(token_ids, params, request_id=str(index), priority=request.priority))


# ---- the picture


def plot(path: Path, report: Figure) -> None:
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(11, 7), layout="constrained")
    (throughput, overhead), (latency, methods) = picture.subplots(2, 2)
    draw_sweep(throughput, report, "crowded", "output tokens/s", lambda figure: figure["output_tokens_per_s"])
    for name in MIXES:
        draw_sweep(
            overhead, report, name, "device time lost (%)", lambda figure: figure["overhead_percent"], label=name
        )
    draw_sweep(latency, report, "everyday", "questions' TTFT, p99 (ms)", lambda f: f["interactive_ttft_ms"]["p99"])
    draw_methods(methods, report["swap_or_recompute"])
    for axes in (throughput, overhead, latency):
        axes.set_ylim(bottom=0)
    overhead.set_title("what preemption costs")
    methods.set_title("one job that yields everything and resumes (dotted: auto)")
    picture.savefig(path, dpi=120)


def draw_sweep(
    axes: Any, report: Figure, name: str, what: str, value: Callable[[Figure], float], *, label: str = ""
) -> None:
    figures = [figure for figure in report["sweep"] if figure["mix"] == name]
    for mode, style in zip(MODES, ("o-", "s--")):
        swept = [figure for figure in figures if figure["mode"] == mode]
        axes.plot([f["time_slice"] for f in swept], [value(f) for f in swept], style, label=f"{label} {mode}".strip())
    if not label:
        axes.axhline(value(figures[0]), color="gray", linestyle=":", label="no preemption")
        axes.set_title(f"the {name} mix")
    axes.set(xscale="log", xlabel="time slice (ms)", ylabel=what)
    axes.set_xticks(SLICES_MS, [str(ms) for ms in SLICES_MS], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def draw_methods(axes: Any, figures: list[Figure]) -> None:
    for name, colour in zip(COSTS, ("C0", "C1", "C2", "C3")):
        here = [figure for figure in figures if figure["cost"] == name]
        for method, style in (("swap", "-"), ("auto", ":")):
            ratio = [figure["job_e2e_ms"][method] / figure["job_e2e_ms"]["recompute"] for figure in here]
            label = f"swap, {name}" if method == "swap" else None
            axes.plot([figure["context"] for figure in here], ratio, style, marker="o", color=colour, label=label)
    axes.axhline(1.0, color="gray", linestyle=":")
    axes.set(xscale="log", xlabel="context (tokens)", ylabel="job's latency, of that by recomputation")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
