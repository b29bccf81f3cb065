"""The Mosaic GPU kernels in JAX's interpreter for GPUs: right within bfloat16, without a race, and never hanging.

Inputs are new ones each time; a failure names the seed. `make mosaic` goes through more shapes.
"""

import secrets
from typing import Any

import pytest

from pallas_kernels.mosaic.support import api_gap
from tests.pallas_kernels.mosaic.interpreter import interpret
from tests.pallas_kernels.mosaic.mutants import HASTY, RACES, UNAWAITED, WRONG

pytestmark = pytest.mark.skipif(api_gap() is not None, reason=str(api_gap()))

LIMIT_S = 240  # a job takes some seconds, but the machine may be busy
TOLERANCE = 2e-2
SOUND = {
    "decodes at the edges of blocks and tiles": {
        "op": "decode",
        "shape": (3, 1, 64, 16),
        "rows": [(1, n) for n in (0, 1, 16, 63, 65, 200)],
        "tiles": {"tile_kv": 64, "slots": 2},
        "sinks": True,
    },
    "decodes in pieces": {
        "op": "decode",
        "shape": (3, 1, 64, 16),
        "rows": [(1, 0), (1, 64), (1, 400), (1, 65)],
        "tiles": {"min_piece": 64, "num_programs": 6},
    },
    "decodes in pieces with a window, a soft-cap and sinks": {
        "op": "decode",
        "shape": (4, 2, 64, 8),
        "rows": [(1, 0), (1, 20), (1, 300)],
        "tiles": {"min_piece": 64, "num_programs": 8},
        "window": 150,
        "softcap": 2.0,
        "sinks": True,
    },
    "chunks that share tiles": {
        "op": "prefill",
        "shape": (2, 1, 64, 16),
        "rows": [(1, 9), (5, 70), (2, 2), (70, 133)],
        "padding": 4,
    },
    "chunks with a window, a soft-cap and sinks": {
        "op": "prefill",
        "shape": (2, 1, 64, 16),
        "rows": [(130, 300)],
        "window": 90,
        "softcap": 2.0,
        "sinks": True,
    },
    "a tile before the windows of later queries": {
        "op": "prefill",
        "shape": (1, 1, 256, 64),
        "rows": [(50, 200)],
        "window": 60,
    },
    "one consumer": {
        "op": "prefill",
        "shape": (1, 1, 64, 64),
        "rows": [(70, 80), (3, 100)],
        "tiles": {"consumers": 1, "tile_kv": 64, "slots": 2},
    },
    "decodes and chunks of one batch": {
        "op": "ragged",
        "shape": (2, 1, 64, 32),
        "rows": [(1, 1), (1, 40), (20, 50), (0, 0)],
        "padding": 9,
    },
    "nothing but padding": {"op": "ragged", "shape": (1, 1, 64, 16), "rows": [(0, 0)], "padding": 3},
}
LONG_DECODE = {"op": "decode", "shape": (2, 1, 64, 16), "rows": [(1, 200)], "tiles": {"tile_kv": 64, "slots": 2}}
IDLE_CONSUMER = {"op": "prefill", "shape": (1, 1, 64, 64), "rows": [(10, 600)], "tiles": {"slots": 2}}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Of all jobs, in two processes: sound kernels first, so that no bug planted later disturbs them."""
    seed = secrets.randbits(32)
    mutants = {name: {**LONG_DECODE, "mutant": name} for name in (*RACES, *UNAWAITED, *WRONG)}
    mutants |= {name: {**IDLE_CONSUMER, "mutant": name} for name in HASTY}
    sound = {**SOUND, "long": LONG_DECODE, "idle": IDLE_CONSUMER}
    found = {}
    for jobs in (sound, mutants):
        found |= interpret({name: {"seed": seed, **job} for name, job in jobs.items()}, LIMIT_S)
    return {name: {"seed": seed, **result} for name, result in found.items()}


@pytest.mark.parametrize("name", [*SOUND, "long", "idle"])
def test_a_kernel_is_right_and_has_no_race(results, name):
    result = results[name]
    assert result["raised"] is None
    assert not result["raced"]
    assert result["error"] < TOLERANCE, result


@pytest.mark.parametrize("name", RACES)
def test_the_detector_sees_a_planted_race(results, name):
    assert results[name]["raced"], results[name]


@pytest.mark.parametrize("name", [*UNAWAITED, *HASTY])
def test_a_barrier_that_nobody_awaits_is_refused(results, name):
    assert results[name]["raised"] is not None or results[name]["raced"], results[name]


@pytest.mark.parametrize("name", WRONG)
def test_nan_in_unused_slots_shows_what_reads_them(results, name):
    assert results[name]["error"] == float("inf")
