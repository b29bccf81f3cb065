"""The Mosaic GPU kernels in JAX's interpreter for GPUs: right within bfloat16, without a race, and never hanging.

Inputs are new ones each time; a failure names the seed. `make mosaic` goes through more shapes.
"""

import os
import secrets
from collections.abc import Iterable
from typing import Any

import pytest

from pallas_kernels.mosaic.support import api_gap
from tests.pallas_kernels.mosaic.interpreter import interpret
from tests.pallas_kernels.mosaic.mutants import HASTY, RACES, SHARED, STEP, UNAWAITED, WINDOWED, WRONG

pytestmark = pytest.mark.skipif(api_gap() is not None, reason=str(api_gap()))

LIMIT_S = 240  # a job takes some seconds, but the machine may be busy
TOLERANCE = 2e-2
LONG_DECODE = {"op": "decode", "shape": (2, 1, 64, 16), "rows": [(1, 200)], "tiles": {"tile_kv": 64, "slots": 2}}
IDLE_CONSUMER = {"op": "prefill", "shape": (1, 1, 64, 64), "rows": [(10, 600)], "tiles": {"slots": 2}}
# The last row's first query sees all but one token of the first tile.
SHARED_TILES = {
    "op": "prefill",
    "shape": (2, 1, 64, 16),
    "rows": [(1, 9), (5, 70), (2, 2), (70, 132)],
    "padding": 4,
    "tiles": {"tile_kv": 64, "num_programs": 3},
}
WINDOW = {
    "op": "prefill",
    "shape": (1, 1, 64, 16),
    "rows": [(130, 300)],
    "window": 90,
    "softcap": 2.0,
    "sinks": True,
}
STEP_OF_BOTH = {
    "op": "ragged",
    "shape": (2, 2, 64, 32),
    "rows": [(1, 1), (1, 40), (20, 50), (0, 0)],
    "padding": 9,
}
SOUND = {
    "decodes at the edges of blocks and tiles": {
        "op": "decode",
        "shape": (3, 1, 64, 16),
        "rows": [(1, n) for n in (0, 1, 16, 63, 65, 200)],
        "tiles": {"tile_kv": 64, "slots": 2},
        "sinks": True,
    },
    "decodes in pieces with a window, a soft-cap and sinks": {
        "op": "decode",
        "shape": (4, 2, 64, 16),
        "rows": [(1, 0), (1, 20), (1, 250)],
        "tiles": {"tile_kv": 64, "min_piece": 64, "num_programs": 8},
        "window": 150,
        "softcap": 2.0,
        "sinks": True,
    },
    "a long decode": LONG_DECODE,
    "chunks that share tiles": SHARED_TILES,
    "chunks with a window, a soft-cap and sinks": WINDOW,
    "a consumer without queries": IDLE_CONSUMER,
    "a tile before the windows of later queries": {
        "op": "prefill",
        "shape": (1, 1, 256, 64),
        "rows": [(50, 200)],
        "window": 60,
    },
    "decodes and chunks of one batch": STEP_OF_BOTH,
    "nothing but padding": {"op": "prefill", "shape": (1, 1, 64, 16), "rows": [(0, 0)], "padding": 3},
}
BUGGY = (
    (RACES | UNAWAITED | WRONG, LONG_DECODE),
    (HASTY, IDLE_CONSUMER),
    (SHARED, SHARED_TILES),
    (WINDOWED, WINDOW),
    (STEP, STEP_OF_BOTH),
)
# Each compiles a kernel anew, so all are planted only with MUTANTS=all in the environment, as `make mosaic` does.
FEW = (
    "frees V before it multiplies",
    "stores what it did not commit",
    "fills slots that are not free",
    "does not clear V",
    "passes over tiles without waiting",
    "writes nothing",
)


def chosen(bugs: Iterable[str]) -> list[str]:
    return [name for name in bugs if name in FEW or os.environ.get("MUTANTS") == "all"]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Of all jobs, in two processes: sound kernels first, so that no bug planted later disturbs them."""
    seed = secrets.randbits(32)
    mutants = {name: {**job, "mutant": name} for bugs, job in BUGGY for name in chosen(bugs)}
    found = {}
    for jobs in (SOUND, mutants):
        found |= interpret({name: {"seed": seed, **job} for name, job in jobs.items()}, LIMIT_S)
    return {name: {"seed": seed, **result} for name, result in found.items()}


@pytest.mark.parametrize("name", SOUND)
def test_a_kernel_is_right_and_has_no_race(results, name):
    result = results[name]
    assert result["raised"] is None
    assert not result["raced"]
    assert result["error"] < TOLERANCE, result


@pytest.mark.parametrize("name", chosen(RACES))
def test_the_detector_sees_a_planted_race(results, name):
    assert results[name]["raced"], results[name]


@pytest.mark.parametrize("name", chosen(UNAWAITED | HASTY))
def test_a_barrier_that_nobody_awaits_is_refused(results, name):
    assert results[name]["raised"] is not None or results[name]["raced"], results[name]


@pytest.mark.parametrize("name", chosen(WRONG | SHARED | WINDOWED | STEP))
def test_numbers_or_the_detector_show_what_is_read_or_written_wrongly(results, name):
    result = results[name]
    assert result["raised"] is not None or result["raced"] or not result["error"] < TOLERANCE, result
