"""Where a step of the native kernels spends its time, and how near each part comes to what the machine can do.

    python benchmarks/roofline.py [--weights int4] [--json benchmarks/results/roofline.json]

A SmolLM2-135M-shaped model with random weights. Each part runs by itself, all its layers in one program, and the
whole step as in benchmarks/kernels.py; the least times count. A part's floor is max(bytes / bandwidth, operations /
peak): the bandwidth at which as many threads sum memory, the peak of the instruction that the part multiplies by. What
a part reads twice, or computes beside its products, is no part of the floor. "rest" is what the parts do not explain.

`--clock cpu` counts the CPU time of the process, on a machine that others use too; with one thread alone, as threads
spin while they wait:

    PAGEDJAX_NUM_THREADS=1 python benchmarks/roofline.py --clock cpu
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import products

from pagedjax.bench.machine import origin
from pallas_kernels import dispatch, native
from pallas_kernels.ragged_attention import AttentionShape, Ragged

CONTEXT = 256
NUM_BLOCKS = 2048
SHAPE = AttentionShape(kernels.CONFIG.num_heads, kernels.CONFIG.num_kv_heads, kernels.CONFIG.head_dim, 16)
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
PEAKS: tuple[Literal["bfloat16", "bytes"], ...] = ("bfloat16", "bytes")
# What weights of a layout become for the products of layers, and for the head.
FORMS = {"int4": ("4 bits", "8 bits"), "packed_bf16": ("bf16", "bf16")}


class Machine(NamedTuple):
    """Bytes a second from memory; operations a second, by what is multiplied."""

    bandwidth: float
    peaks: dict[str, float]


class Part(NamedTuple):
    """One part of a step: seconds, and what it must move and multiply."""

    name: str
    seconds: float
    num_bytes: float
    operations: float
    multiplies: str

    def floor(self, machine: Machine) -> float:
        return max(self.num_bytes / machine.bandwidth, self.operations / machine.peaks[self.multiplies])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="int4", choices=FORMS)
    parser.add_argument("--decode", type=int, nargs="*", default=(1, 8, 32, 64))
    parser.add_argument("--prefill", type=int, nargs="*", default=(128, 256, 512))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--json")
    options = parser.parse_args()
    library, clock = native.load(), CLOCKS[options.clock]
    if options.clock == "cpu" and library.num_threads > 1:
        parser.error("--clock cpu takes PAGEDJAX_NUM_THREADS=1: threads that wait for others spin")
    machine = measure_machine(library.num_threads, clock)
    rates = (f"{kind} {rate / 1e9:.0f} GOP/s" for kind, rate in machine.peaks.items())
    print(f"{machine.bandwidth / 1e9:.1f} GB/s", *rates)
    kinds = [kernels.Kind(f"decode {n}", n, ((1, CONTEXT),) * n) for n in options.decode]
    kinds += [kernels.Kind(f"prefill {n}", n, ((n, n),)) for n in options.prefill]
    steps = Parts(options.weights, options.repeats, clock).measure(kinds, machine)
    if options.json:
        record = {
            **origin(__file__),
            "level": library.level,
            "num_threads": library.num_threads,
            "gb_per_s": round(machine.bandwidth / 1e9, 1),
            "gop_per_s": {kind: round(rate / 1e9) for kind, rate in machine.peaks.items()},
            "weights": options.weights,
            "clock": options.clock,
            "steps": steps,
        }
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def measure_machine(num_threads: int, clock: Clock) -> Machine:
    bandwidth = products.bandwidth(num_threads, clock) * 1e9
    return Machine(bandwidth, {kind: max(native.peak_rate(kind, clock=clock) for _ in range(3)) for kind in PEAKS})


class Parts:
    """A model's weights, and the ways to time it."""

    def __init__(self, weights: str, repeats: int, clock: Clock) -> None:
        self.multiplies = "bytes" if weights == "int4" else "bfloat16"
        self.repeats, self.clock = repeats, clock
        choice = dispatch.choose("ragged_attention", platform="cpu", shape=SHAPE, dtype="bfloat16", wish="native")
        self.backend = choice.backend
        self.bench = kernels.Bench(self.backend, "bfloat16", weights, repeats)
        self.made = {product.name: make_weights(product, weights) for product in products.PRODUCTS}

    def measure(self, kinds: list[kernels.Kind], machine: Machine) -> list[dict[str, Any]]:
        found = []
        for kind in kinds:
            step = self.bench.measure(kind)
            whole_s = step["cpu_ms" if self.clock is time.process_time else "ms"] / 1e3
            found.append(describe(kind, whole_s, [*self.products(kind), self.attention(kind)], machine))
        return found

    def products(self, kind: kernels.Kind) -> Iterator[Part]:
        for product in products.PRODUCTS:
            num_rows = len(kind.rows) if product.name == "head" else kind.num_tokens
            x = jnp.asarray(np.random.default_rng(1).standard_normal((num_rows, product.num_in)), jnp.bfloat16)
            made = self.made[product.name]
            run = jax.jit(lambda x, many, product=product: [products.call(product, x, weight) for weight in many])
            seconds = self.least(lambda run=run, x=x, made=made: jax.block_until_ready(run(x, made)))
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(made))
            operations = 2.0 * num_rows * product.num_out * product.num_in * product.copies
            yield Part(product.name, seconds, num_bytes, operations, self.multiplies)

    def attention(self, kind: kernels.Kind) -> Part:
        config = kernels.CONFIG
        held = list(kernels.empty_caches(self.backend, NUM_BLOCKS, "bfloat16"))
        ragged = Ragged(*map(jnp.asarray, kernels.pack(kind, NUM_BLOCKS)[2]))
        heads = (kind.num_tokens, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        qkv = jnp.asarray(np.random.default_rng(2).standard_normal(heads), jnp.bfloat16)
        turns = (jnp.ones((kind.num_tokens, config.head_dim // 2)),) * 2

        def layers(cache: Any) -> tuple[list[jax.Array], Any]:
            outs = []
            for layer in range(config.num_layers):
                out, cache = self.backend.attend_turned(qkv, turns, cache, ragged, scale=0.125, layer=layer)
                outs.append(out)
            return outs, cache

        run = jax.jit(layers, donate_argnums=0)

        def once() -> None:
            outs, held[0] = run(held[0])
            jax.block_until_ready(outs)

        seconds = self.least(once)
        seen = sum(kv_len * q_len - q_len * (q_len - 1) // 2 for q_len, kv_len in kind.rows)
        per_token = 2 * config.head_dim * config.num_layers  # numbers of K and V of one head
        num_bytes = 2 * per_token * config.num_kv_heads * sum(kv_len for _, kv_len in kind.rows)
        return Part("attention", seconds, num_bytes, 2.0 * per_token * config.num_heads * seen, "bfloat16")

    def least(self, run: Callable[[], Any]) -> float:
        run()  # compiles
        return min(products.timed(run, self.clock) for _ in range(self.repeats))


def make_weights(product: products.Product, weights: str) -> list[Any]:
    form = FORMS[weights][product.name == "head"]
    floats = np.random.default_rng(0).standard_normal((product.num_out, product.num_in), np.float32) * 0.02
    return products.copies(products.LAYOUTS[form](floats), product.copies)


def describe(kind: kernels.Kind, whole_s: float, parts: list[Part], machine: Machine) -> dict[str, Any]:
    floor_s = sum(part.floor(machine) for part in parts)
    rest_s = whole_s - sum(part.seconds for part in parts)
    found = {
        "step": kind.name,
        "ms": round(whole_s * 1e3, 2),
        "tokens_per_s": round(kind.num_tokens / whole_s),
        "floor_ms": round(floor_s * 1e3, 2),
        "of_roofline": round(floor_s / whole_s, 3),
        "parts_ms": {part.name: round(part.seconds * 1e3, 2) for part in parts} | {"rest": round(rest_s * 1e3, 2)},
        "parts_of_roofline": {part.name: round(part.floor(machine) / part.seconds, 3) for part in parts},
    }
    print("  ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    return found


if __name__ == "__main__":
    main()
