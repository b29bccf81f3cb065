"""`python -m tests.pallas_kernels.mosaic.sweep`: the Mosaic GPU kernels in the interpreter, over random shapes.

Prints a line a case and exits with 1 if one was wrong, raced, raised or did not end. A case takes some seconds to a
minute; the seed is printed, and `--seed` repeats it.
"""

import argparse
import random
import sys
from typing import Any

from pallas_kernels.mosaic.support import BLOCK_SIZES
from tests.pallas_kernels.mosaic.interpreter import interpret

HEAD_DIMS = {"decode": (64, 80, 96, 128, 256), "prefill": (64, 128, 256), "ragged": (64, 128, 256)}
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pallas_kernels.mosaic.sweep", description=__doc__)
    parser.add_argument("--num", type=int, default=30, help="cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--limit-s", type=float, default=300, help="of one case (default: %(default)s)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}")
    rng, num_bad = random.Random(seed), 0
    for _ in range(options.num):
        job = make_job(rng)
        verdict = judge(job, interpret({"job": job}, options.limit_s, quiet=True).get("job"))
        num_bad += verdict != "ok"
        print(verdict, job, flush=True)
    print(f"{options.num - num_bad} of {options.num} are sound")
    return num_bad > 0


def make_job(rng: random.Random) -> dict[str, Any]:
    op = rng.choice(list(HEAD_DIMS))
    head_dim, block_size = rng.choice(HEAD_DIMS[op]), rng.choice(BLOCK_SIZES)
    kv_heads, group = rng.choice(((1, 1), (1, 3), (2, 2), (1, 8), (1, 16)))
    return {
        "op": op,
        "shape": (kv_heads * group, kv_heads, head_dim, block_size),
        "rows": make_rows(rng, op, block_size),
        "padding": 0 if op == "decode" else rng.choice((0, 5, 64)),
        "dtype": rng.choice(list(TOLERANCE)),
        "window": rng.choice((None, None, 1, block_size, 100)),
        "softcap": rng.choice((None, None, 2.0)),
        "sinks": rng.random() < 0.3,
        # Smaller pieces than on a GPU, so that contexts are cut here too.
        "tiles": {"min_piece": rng.choice((64, 128, 512)), "num_programs": 8} if op == "decode" else None,
        "seed": rng.randrange(1 << 32),
    }


def make_rows(rng: random.Random, op: str, block_size: int) -> list[tuple[int, int]]:
    """Lengths at the edges of blocks and tiles, one long among short ones."""

    def kv_len() -> int:
        edge = rng.choice((1, block_size, 64, 128, 256))
        return max(1, edge * rng.choice((1, 1, 2)) + rng.choice((-1, 0, 1)))

    decodes = [(1, kv_len()) for _ in range(rng.randint(op == "decode", 3))]
    if op == "decode":
        return [*decodes, (1, 0)]
    chunks = []
    for _ in range(rng.randint(1, 3)):
        length = kv_len()
        chunks.append((rng.randint(1, min(length, 140)), length))
    return [*decodes, *chunks, (0, 0)]


def judge(job: dict[str, Any], result: dict[str, Any] | None) -> str:
    if result is None:
        return "did not end"
    if result["raised"] is not None:
        return f"raised {result['raised']}"
    if result["raced"]:
        return "raced"
    return "ok" if result["error"] < TOLERANCE[job["dtype"]] else f"wrong by {result['error']:.2g}"


if __name__ == "__main__":
    sys.exit(main())
