"""Run the checks of one part: `python -m scripts.gpu_check.part NAME --results FILE [--stand-in] [--skip N]`.

Each check appends a line when it begins and one when it ends, so that whoever watches knows what a hang was about.
"""

import argparse
import importlib
import json
import time
import traceback
import warnings
from pathlib import Path

from scripts.gpu_check.checks import Check, Refused, Skipped

PARTS = ("parity", "kernels", "engine", "goldens", "host_copies", "torch_kernels", "torch_generate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--skip", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    checks = importlib.import_module(f"scripts.gpu_check.{options.part}").checks(stand_in=options.stand_in)
    with options.results.open("a") as file:
        for check in list(checks)[options.skip :]:
            print(json.dumps({"began": check.name, "limit_s": check.limit_s}), file=file, flush=True)
            print(json.dumps({"part": options.part, "name": check.name, **outcome(check)}), file=file, flush=True)


def outcome(check: Check) -> dict[str, object]:
    """Whatever a check raises is a result."""
    began = time.perf_counter()
    try:
        found: dict[str, object] = {"status": "ok", "figures": check.run()}
    except Refused as reason:
        found = {"status": "refused", "reason": str(reason)}
    except Skipped as reason:
        found = {"status": "skipped", "reason": str(reason)}
    except Exception as error:  # wrong results too: nothing may stop the other checks
        where = traceback.format_exc(limit=-3)
        found = {"status": "failed", "reason": f"{type(error).__name__}: {str(error)[:500]}", "where": where}
    return found | {"took_s": round(time.perf_counter() - began, 2)}


if __name__ == "__main__":
    main()
