"""Products with SmolLM2-135M's weights, native layouts beside XLA's bfloat16, alternating in one run.

    python benchmarks/products.py [--rows 1 8 32 256] [--json benchmarks/results/products.json]

A call does what the model does there: norm before, SwiGLU or residual after. Each product runs over as many copies of
its weight as a model has layers, so that small ones come from where they would in a step. The least time counts. GB/s
are the weight's bytes, beside the bandwidth at which as many threads sum memory; GOP/s count multiplications and
additions.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.bench.machine import origin
from pallas_kernels import native
from pallas_kernels.matmul import FloatWeight, Norm, linear, pack_floats, pack_quantised, packing


class Product(NamedTuple):
    """One product of a layer; `copies` of its weight lie in memory."""

    name: str
    num_out: int
    num_in: int
    copies: int = 30
    gated: bool = False
    residual: bool = False
    normed: bool = True


PRODUCTS = (
    Product("qkv", 960, 576),
    Product("o", 576, 576, residual=True, normed=False),
    Product("gate_up", 3072, 576, gated=True),
    Product("down", 576, 1536, residual=True, normed=False),
    Product("head", 49152, 576, copies=1, normed=False),
)
LAYOUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "xla bf16": lambda w: FloatWeight(jnp.asarray(w, jnp.bfloat16)),
    "bf16": pack_floats,
    "4 bits": lambda w: pack_quantised([packing.quantise_nibbles(w)]),
    "8 bits": lambda w: pack_quantised([packing.quantise_bytes(w)]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 32, 256))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    library = native.load()
    record = {
        **origin(__file__),
        "level": library.level,
        "num_threads": library.num_threads,
        "bandwidth_gb_s": round(bandwidth(library.num_threads), 1),
        "products": [row for product in PRODUCTS for row in measure(product, options.rows, options.rounds)],
    }
    print(f"memory is summed at {record['bandwidth_gb_s']} GB/s by {library.num_threads} threads")
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def bandwidth(num_threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """GB/s at which threads read memory of their own, the best of some tries: by maxima of integers, as sums of floats
    wait for arithmetic."""
    parts = [np.ones(1 << 25, np.int32) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        seconds = min(timed(lambda: list(pool.map(np.max, parts)), clock) for _ in range(7))
    return sum(part.nbytes for part in parts) / seconds / 1e9


def measure(product: Product, rows: tuple[int, ...], rounds: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    floats = rng.standard_normal((product.num_out, product.num_in), np.float32) * 0.02
    weights = {name: copies(make(floats), product.copies) for name, make in LAYOUTS.items()}
    for num_rows in rows:
        x = jnp.asarray(rng.standard_normal((num_rows, product.num_in)), jnp.bfloat16)
        run = jax.jit(lambda x, weights: [call(product, x, weight) for weight in weights])
        best = dict.fromkeys(LAYOUTS, float("inf"))
        for _ in range(rounds + 1):  # the first compiles
            for name in LAYOUTS:
                best[name] = min(best[name], timed(lambda: jax.block_until_ready(run(x, weights[name]))))  # noqa: B023
        for name in LAYOUTS:
            seconds = best[name] / product.copies
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights[name])) / product.copies
            row = {
                "product": product.name,
                "rows": num_rows,
                "layout": name,
                "us": round(seconds * 1e6, 1),
                "gb_per_s": round(num_bytes / seconds / 1e9, 1),
                "gop_per_s": round(2 * num_rows * product.num_out * product.num_in / seconds / 1e9, 1),
                "times_xla": round(best["xla bf16"] / best[name], 2),
            }
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            yield row


def call(product: Product, x: jax.Array, weight: Any) -> jax.Array:
    norm = Norm(jnp.ones(product.num_in), 1e-5) if product.normed else None
    residual = jnp.ones((x.shape[0], product.num_out), x.dtype) if product.residual else None
    out_dtype = jnp.float32 if product.name == "head" else x.dtype
    options = {"norm": norm, "gated": product.gated, "residual": residual, "fine_input": product.name == "down"}
    return linear(x, weight, **options, out_dtype=out_dtype)


def copies(weight: Any, count: int) -> list[Any]:
    return [jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), weight) for _ in range(count)]


def timed(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    run()
    return clock() - began


if __name__ == "__main__":
    main()
