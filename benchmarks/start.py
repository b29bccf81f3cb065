"""How long `pagedjax serve` takes to be ready, cold and warm, and what CPU it takes once nobody asks it anything.

    python benchmarks/start.py [--model smollm2-135m] [--warm 3] [--json benchmarks/results/start.json]

A cold start finds the model alone: no compiled programs, no packed weights. A warm one finds what the cold one left.
Both run in a folder of their own in place of PAGEDJAX_HOME. Seconds are those until /ready answers 200; CPU seconds and
peak memory are those of all the server's processes until then.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from pagedjax.bench.machine import cpu_seconds, origin, peak_memory_bytes
from pagedjax.bench.server_process import serving
from pagedjax.weights import store

TIMEOUT_S = 300.0
# A server that has just come up may still have something to do.
SETTLE_S, IDLE_S = 5.0, 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--warm", type=int, default=3, help="warm starts")
    parser.add_argument("--json")
    options = parser.parse_args()
    model = str(store.resolve(options.model))
    record: dict[str, Any] = {**origin(__file__), "model": options.model, "starts": []}
    with tempfile.TemporaryDirectory() as home:
        os.environ["PAGEDJAX_HOME"] = home
        for index in range(1 + options.warm):
            found = start(model, "cold" if index == 0 else "warm", idles=index == options.warm)
            print("  ".join(f"{name} {value}" for name, value in found.items()), flush=True)
            record["starts"].append(found)
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def start(model: str, kind: str, *, idles: bool) -> dict[str, Any]:
    """One start; with `idles`, the share of one CPU that the server takes while idle, too."""
    began = time.perf_counter()
    with serving(model, {}, TIMEOUT_S) as (_, pid):
        found: dict[str, Any] = {
            "start": kind,
            "seconds": round(time.perf_counter() - began, 1),
            "cpu_s": round(cpu_seconds(pid) or 0.0, 1),
            "peak_mib": round((peak_memory_bytes(pid) or 0) / 2**20),
        }
        if idles:
            time.sleep(SETTLE_S)
            before_s = cpu_seconds(pid) or 0.0
            time.sleep(IDLE_S)
            found["idle_cpu_share"] = round(((cpu_seconds(pid) or 0.0) - before_s) / IDLE_S, 4)
    return found


if __name__ == "__main__":
    main()
