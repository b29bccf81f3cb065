"""Runs kernels in the Mosaic GPU interpreter with race detection, in a process that may hang: see `interpreter.py`.

`python -m tests.pallas_kernels.mosaic.interpret` reads jobs from standard input, one JSON object a line, and prints for
each a line of JSON: `error`, the largest difference from float64; `raced`; and `raised`, what was raised instead.
"""

import contextlib
import json
import os
import sys
import traceback
from functools import partial
from typing import Any

import jax
import numpy as np

from pallas_kernels.mosaic import support
from pallas_kernels.mosaic.tiles import PrefillTiles, decode_tiles, prefill_tiles
from pallas_kernels.paged_attention import pallas_mosaic as paged_attention
from pallas_kernels.ragged_attention import AttentionShape
from pallas_kernels.ragged_attention import pallas_mosaic as ragged_attention
from tests.pallas_kernels.mosaic.batches import LAYER, Batch, expected, make_batch
from tests.pallas_kernels.mosaic.mutants import MUTANTS
from tests.pallas_kernels.planting import planted


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        result = {"error": None, "raced": False, "raised": None}
        try:
            bug = job.pop("mutant", None)
            with planted(MUTANTS[bug]) if bug else contextlib.nullcontext():
                result["error"] = run(**job)
            result["raced"] = found_races()
        except Exception as raised:
            traceback.print_exc()
            result["raised"] = repr(raised)[:300]
            result["raced"] = found_races()
            reset()
        print("RESULT", json.dumps(result), flush=True)


def run(
    op: str,
    shape: list[int],
    rows: list[list[int]],
    seed: int,
    padding: int = 0,
    dtype: str = "bfloat16",
    sinks: bool = False,
    tiles: dict[str, int] | None = None,
    **scoring: Any,
) -> float:
    """The largest difference, infinite where the kernel gives NaN."""
    rng = np.random.default_rng(seed)
    batch = make_batch(AttentionShape(*shape), [tuple(row) for row in rows], padding, dtype, rng)
    if sinks:
        scoring["sinks"] = rng.uniform(1, 6, shape[0]).astype(np.float32)  # so large that none goes unnoticed
    got = np.asarray(jax.jit(partial(OPS[op], batch, tiles or {}, scoring))(), np.float64)
    wanted = expected(batch, **scoring)
    if op == "prefill":  # decode rows are another kernel's
        got, wanted = (x[int(batch.ragged.num_decode_rows) :] for x in (got, wanted))
    difference = np.abs(got - wanted)
    return float(np.max(np.where(np.isnan(difference), np.inf, difference), initial=0))


def _decode(batch: Batch, tiles: dict[str, int], scoring: dict[str, Any]) -> jax.Array:
    rows = batch.cache, batch.ragged.block_tables, batch.ragged.kv_lens
    options = _options(batch, scoring, decode_tiles(batch.shape.head_dim)._replace(**tiles))
    return paged_attention.attend(batch.q, *rows, **options)


def _prefill(batch: Batch, tiles: dict[str, int], scoring: dict[str, Any]) -> jax.Array:
    options = _options(batch, scoring, _few(batch, tiles))
    return ragged_attention.prefill(batch.q, batch.cache, batch.ragged, **options)


def _ragged(batch: Batch, tiles: dict[str, int], scoring: dict[str, Any]) -> jax.Array:
    """The whole op, which writes the step's tokens before it attends to them."""
    options = _options(batch, scoring, _few(batch, tiles))
    return ragged_attention.attend(batch.q, batch.k, batch.v, batch.before, batch.ragged, **options)[0]


OPS = {"decode": _decode, "prefill": _prefill, "ragged": _ragged}


def _few(batch: Batch, tiles: dict[str, int]) -> PrefillTiles:
    """Two programs, so that each has several pieces of work."""
    return prefill_tiles(batch.shape.head_dim)._replace(**{"num_programs": 2, **tiles})


def _options(batch: Batch, scoring: dict[str, Any], tiles: Any) -> dict[str, Any]:
    scale = batch.shape.head_dim**-0.5
    return {"scale": scale, "layer": LAYER, "tiles": tiles, "interpret": support.interpreter(), **scoring}


def found_races() -> bool:
    # JAX 0.11 says it nowhere in public; 0.12 raises.
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    with contextlib.suppress(AssertionError):  # before the first kernel there is nothing to ask
        return bool(getattr(interpret_pallas_call.get_races(), "races_found", False))
    return False


def reset() -> None:
    """What the interpreter asks for before it is used again."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of a kernel that failed may wait for ever
