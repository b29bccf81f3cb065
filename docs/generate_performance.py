"""Draw images/performance.svg from benchmarks/results: engines beside each other, and steps beside the roofline.

python docs/generate_performance.py    # after a run of benchmarks/peers.py or benchmarks/roofline.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
IMAGE = Path(__file__).with_name("images") / "performance.svg"
ENGINES = {
    "pagedjax": "pagedjax, 4 bits",
    "pagedjax_bf16": "pagedjax, bfloat16",
    "vllm": "vLLM, bfloat16",
    "openvino": "OpenVINO, bfloat16",
}
WORKLOADS = {"W1": "W1: one at a time", "W2": "W2: burst of 64", "W4": "W4: shared prefix"}


def draw(peers: dict[str, Any], roofline: dict[str, Any]) -> Figure:
    """Left: output tokens a second over vLLM's, themselves on the bars. Right: the floor's share of each step."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    beside, steps = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_engines(beside, peers["medians"])
    _draw_steps(steps, roofline["steps"])
    return figure


def _draw_engines(axes: Any, medians: dict[str, Any]) -> None:
    width = 0.8 / len(ENGINES)
    for i, (engine, label) in enumerate(ENGINES.items()):
        rates = [medians[workload][engine]["out tok/s"] for workload in WORKLOADS]
        ratios = [rate / medians[workload]["vllm"]["out tok/s"] for rate, workload in zip(rates, WORKLOADS)]
        places = [place + (i - (len(ENGINES) - 1) / 2) * width for place in range(len(WORKLOADS))]
        bars = axes.bar(places, ratios, width * 0.92, label=label)
        axes.bar_label(bars, [f"{rate:.0f}" for rate in rates], fontsize=8)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(WORKLOADS)), WORKLOADS.values())
    axes.set_ylabel("output tokens/s over vLLM's (bars: tokens/s)")
    axes.legend()


def _draw_steps(axes: Any, steps: list[dict[str, Any]]) -> None:
    names = [step["step"] for step in steps][::-1]
    shares = [100 * step["of_roofline"] for step in steps][::-1]
    bars = axes.barh(names, shares)
    axes.bar_label(
        bars, [f"{step['floor_ms']:.1f} of {step['ms']:.1f} ms" for step in steps][::-1], label_type="center"
    )
    axes.axvline(100, color="gray", linewidth=0.8)
    axes.set_xlabel("roofline's floor, % of the step's time")


if __name__ == "__main__":
    # The same figures give the same file.
    mpl.rcParams["svg.hashsalt"] = "pagedjax"
    read = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("peers_vllm", "roofline")]
    draw(*read).savefig(IMAGE, metadata={"Date": None})
    print(f"wrote {IMAGE}")
