"""What preemption costs and what it buys, on mixes of questions and batch jobs.

    python benchmarks/preemption.py --out benchmarks/results/preemption.json --plot docs/images/preemption.png
    python benchmarks/preemption.py --engine --out benchmarks/results/preemption_engine.json

Simulated (the scheduler itself, a cost model in the device's place):

* the committed mixes (`pagedjax/simulator/mixes.py`) at time slices of 10 to 500 ms in both modes, and without preemption;
* one job that yields to a large question and resumes, by recomputation, by swap and as `auto` chooses, by its context.

`--engine` runs a small mix on the real engine and its real clock instead. Overhead is the share of the device's time that
preemption cost: tokens computed again, blocks copied. A switch is the time from the decision that somebody must yield to
the dispatch of the step with the first row of whom it was for; a save is the time from a gather to its TransferDone.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedjax.bench.machine import describe_machine, git_commit, versions
from pagedjax.core.config import SchedulerConfig
from pagedjax.simulator import CPU_XLA, H200_LIKE, CostModel, SimReport, SimRequest, simulate
from pagedjax.simulator.checks import repreempted
from pagedjax.simulator.mixes import BATCH, CROWDED, EVERYDAY, INTERACTIVE, LONG_PROMPTS, Mix
from pagedjax.simulator.report import Summary, summarise

SLICES_MS = (10, 25, 50, 75, 100, 150, 200, 300, 500)
MODES = ("aggressive", "conservative")
MIXES = {"everyday": EVERYDAY, "crowded": CROWDED, "long prompts": LONG_PROMPTS}
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
COSTS = {"h200-like": H200_LIKE, "cpu-xla": CPU_XLA}
Figure = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="run the small mix on the real engine instead")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw the simulated figures")
    args = parser.parse_args()
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "git": git_commit(Path(__file__).parent),
        "machine": describe_machine(),
        "versions": versions(),
    }
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
        "preempted_again_within_16_tokens": len(repreempted(report, 16)),
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
    """What a job of each context loses when it must yield all its blocks once, by method."""
    for name, cost in COSTS.items():
        for context in CONTEXTS:
            alone = yielding_job(cost, context, "recompute", with_question=False)
            lost = {
                method: yielding_job(cost, context, method).totals.lost_us / 1e3
                for method in ("recompute", "swap", "auto")
            }
            chosen = yielding_job(cost, context, "auto").preemptions[0].method
            yield {"cost": name, "context": context, "device_ms_lost": lost, "auto_chooses": chosen}


def yielding_job(cost: CostModel, context: int, method: str, *, with_question: bool = True) -> SimReport:
    """A job that has sampled some tokens when a question comes that needs the whole pool."""
    raise NotImplementedError


if __name__ == "__main__":
    main()
