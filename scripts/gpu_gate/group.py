"""Compile the cases of one provider for one target, in a process of their own: `python -m scripts.gpu_gate.group`.

Each case's result is appended to a file as soon as it is known, so that a crash loses one case only.
"""

import argparse
import importlib
import json
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.gpu_gate import compiling
from scripts.gpu_gate.cases import Case
from scripts.gpu_gate.judging import violations


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("provider")
    parser.add_argument("target")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--ptxas", type=Path, required=True)
    parser.add_argument("--dump", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    provider = importlib.import_module(f"scripts.gpu_gate.providers.{options.provider}")
    cases = [case for case in provider.cases(options.target) if _wanted(case, options)]
    with options.results.open("a") as results:
        for line in _lines(cases[options.skip :], options):
            print(json.dumps(line), file=results, flush=True)


def _wanted(case: Case, options: argparse.Namespace) -> bool:
    return (case.quick or not options.quick) and options.only in case.name


def _lines(cases: list[Case], options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """For each case what it is, before it is tried, then what became of it."""
    for case in cases:
        identity = {name: getattr(case, name) for name in ("op", "backend", "target", "shape")}
        yield identity
        yield identity | _tried(case, options)
    yield {"done": True}


def _tried(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    if case.refused is not None:
        return {"status": "refused", "reasons": [case.refused]}
    try:
        compiled = compiling.compile_case(case, options.ptxas, options.dump)
    except NotImplementedError as error:
        return {"status": "refused", "reasons": [_first_line(error)]}
    # Compilers raise anything; whatever it is, the case has failed and the next one is tried.
    except Exception as error:
        traceback.print_exc()
        return {"status": "violation", "reasons": [f"does not compile: {_first_line(error)}"]}
    found = violations(case, compiled)
    return {"status": "violation" if found else "ok", "reasons": found} | _measured(compiled)


def _measured(compiled: compiling.Compiled) -> dict[str, Any]:
    measured = compiled._asdict()
    # A kernel of each layer may be one of its own, all alike.
    unlike = [kernel for i, kernel in enumerate(compiled.kernels) if kernel not in compiled.kernels[:i]]
    measured["kernels"] = [kernel._asdict() | {"count": compiled.kernels.count(kernel)} for kernel in unlike]
    measured["new_arrays"] = [array._asdict() for array in compiled.new_arrays[:8]]
    return measured


def _first_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return next((line for line in text.splitlines() if line.strip()), text)[:300]


if __name__ == "__main__":
    main()
