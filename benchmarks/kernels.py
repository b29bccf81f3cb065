"""Step times of a SmolLM2-135M-shaped model with random weights, per kind of step, and as the KV pool grows.

    python benchmarks/kernels.py [--dtype bfloat16] [--weights int4] [--json benchmarks/results/kernels.json]

A step is the forward of a packed batch, the head and argmax of each row's last token, the result read on the host. The
least wall time counts; the least CPU time of all threads beside it says what a busy machine hides, with one thread
(PAGEDJAX_NUM_THREADS=1), as threads spin while they wait.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.bench.machine import origin
from pagedjax.models import llama, stack
from pagedjax.models.config import ModelConfig
from pagedjax.weights.pack import Layout, pack_for
from pallas_kernels import dispatch, native
from pallas_kernels.matmul import fused_argmax
from pallas_kernels.ragged_attention import AttentionBackend, AttentionShape, KVBlocks, Ragged

BLOCK_SIZE = 16
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
Rows = tuple[tuple[int, int], ...]  # (query tokens, cached tokens), decodes first


class Kind(NamedTuple):
    """A kind of step: rows in a program of `num_tokens`."""

    name: str
    num_tokens: int
    rows: Rows


KINDS = (
    Kind("decode 1, context 256", 2, ((1, 256),)),
    Kind("decode 1, context 4096", 2, ((1, 4096),)),
    Kind("decode 8, context 256", 8, ((1, 256),) * 8),
    Kind("decode 32, context 256", 32, ((1, 256),) * 32),
    Kind("decode 60, context 256", 64, ((1, 256),) * 60),
    Kind("decode 64, context 256", 64, ((1, 256),) * 64),
    Kind("decode 64, context 64", 64, ((1, 64),) * 64),
    Kind("decode 1 x 4096 + 63 x 64", 64, ((1, 4096),) + ((1, 64),) * 63),
    Kind("prefill 256", 256, ((256, 256),)),
    Kind("prefill 256 after 1024", 256, ((256, 1280),)),
    Kind("prefill 196", 256, ((196, 196),)),
    Kind("prefill 8 x 32", 256, ((32, 32),) * 8),
    Kind("mixed: decode 60 + prefill 196", 256, ((1, 256),) * 60 + ((196, 196),)),
)
POOLS_MIB = (256, 512, 1024, 2048, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--weights", default="int4", choices=("float", "packed_bf16", "grouped", "int8", "int4"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    shape = AttentionShape(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, BLOCK_SIZE)
    platform_name = jax.default_backend()
    backend = dispatch.choose("ragged_attention", platform=platform_name, shape=shape, dtype=options.dtype).backend
    bench = Bench(backend, options.dtype, options.weights, options.repeats)
    record = {
        **origin(__file__),
        "device": jax.devices()[0].device_kind,
        "backend": backend.name,
        "num_threads": native.load().num_threads if backend.name == "native" else None,
        "dtype": options.dtype,
        "weights": options.weights,
        "steps": [bench.measure(kind) for kind in KINDS],
        "pool": [bench.measure(KINDS[3], pool_mib=mib) for mib in POOLS_MIB],
    }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")


class Bench:
    """A model with random weights, and its compiled programs."""

    def __init__(self, backend: AttentionBackend, dtype: str, weights: Layout, repeats: int) -> None:
        self.backend, self.dtype, self.repeats = backend, dtype, repeats
        graph, state = nnx.split(random_model(backend, dtype, weights))
        self.leaves, tree = jax.tree.flatten(state)
        run = partial(step, lambda leaves: nnx.merge(graph, jax.tree.unflatten(tree, leaves)))
        self.run = jax.jit(run, donate_argnums=1)

    def measure(self, kind: Kind, pool_mib: int = 768) -> dict[str, Any]:
        block_bytes = CONFIG.num_layers * self.backend.block_bytes(BLOCK_SIZE, 3, 64, self.dtype)
        num_blocks = (pool_mib << 20) // block_bytes
        caches = empty_caches(self.backend, num_blocks, self.dtype)
        batch = pack(kind, num_blocks)
        began = time.perf_counter(), time.process_time()
        program = self.run.lower(self.leaves, caches, *batch).compile()
        compile_s, compile_cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
        memory = program.memory_analysis()
        wall_ms, cpu_ms = self.times(program, caches, batch)
        tokens = sum(q_len for q_len, _ in kind.rows)
        row = {
            "step": kind.name,
            "pool_mib": pool_mib,
            "ms": round(wall_ms, 2),
            "cpu_ms": round(cpu_ms, 2),
            "tokens_per_s": round(tokens / wall_ms * 1e3, 1),
            "compile_s": round(compile_s, 2),
            "compile_cpu_s": round(compile_cpu_s, 2),
            "temporary_mib": round(memory.temp_size_in_bytes / 2**20, 1),
            "aliased_mib": round(memory.alias_size_in_bytes / 2**20, 1),
        }
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        return row

    def times(self, program: Callable[..., Any], caches: Any, batch: tuple[Any, ...]) -> tuple[float, float]:
        """The least (wall, CPU) milliseconds of a step."""
        wall, cpu = [], []
        for _ in range(self.repeats):
            began = time.perf_counter(), time.process_time()
            ids, caches = program(self.leaves, caches, *batch)
            np.asarray(ids)
            wall.append(time.perf_counter() - began[0])
            cpu.append(time.process_time() - began[1])
        return min(wall) * 1e3, min(cpu) * 1e3


def empty_caches(backend: AttentionBackend, num_blocks: int, dtype: Any) -> tuple[KVBlocks, ...]:
    """Caches of zeros that lie in memory: what nobody has written yet would be read from one page of the system."""
    shapes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "dtype": dtype}
    return jax.tree.map(jnp.zeros_like, stack.init_caches(CONFIG, backend, **shapes))


def step(
    model_of: Callable[[Any], llama.LlamaForCausalLM],
    leaves: Any,
    caches: Any,
    ids: jax.Array,
    positions: jax.Array,
    ragged: Ragged,
    picked: jax.Array,
) -> tuple[jax.Array, Any]:
    """(the likeliest token after each packed token that is picked, caches)."""
    model = model_of(leaves)
    hidden, caches = model(ids, positions, caches, ragged)
    fused = fused_argmax(model.head_weight)
    if fused is not None:
        return fused(hidden[picked], model.head_weight).output, caches
    logits = model.logits(hidden[picked])
    # The first of equal maxima, in two passes: XLA:CPU's argmax takes several times as long.
    is_best = logits == jnp.max(logits, axis=-1, keepdims=True)
    order = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(is_best, order, logits.shape[1]), axis=-1), caches


def random_model(backend: AttentionBackend, dtype: str, weights: Layout) -> llama.LlamaForCausalLM:
    """With weights in a layout of `pack.Layout`; all but "float" take the native kernels."""
    rng = np.random.default_rng(0)
    shapes = {part.name: part.shape for parts in llama.parts(CONFIG).values() for part in parts}

    def tensor(name: str) -> np.ndarray:
        return rng.standard_normal(shapes[name], dtype=np.float32) * 0.02

    encodings = dict.fromkeys(shapes, "F32")
    pack = pack_for(tensor, lambda name: None, encodings, weights, note=lambda weight: None)
    return llama.LlamaForCausalLM.load(CONFIG, tensor, shapes.keys(), dtype=dtype, backend=backend, pack=pack)


def pack(kind: Kind, num_blocks: int) -> tuple[np.ndarray, np.ndarray, Ragged, np.ndarray]:
    """(ids, positions, ragged, the last token of each real row).

    Blocks are scattered over the whole pool, and the table is as wide as the model allows.
    """
    rng = np.random.default_rng(0)
    num_rows = min(kind.num_tokens, 64)
    tables = np.full((num_rows, CONFIG.max_position_embeddings // BLOCK_SIZE), -1)
    positions, slots = np.zeros(kind.num_tokens, np.int32), np.full(kind.num_tokens, -1)
    q_starts, kv_lens = np.zeros(num_rows + 1, int), np.zeros(num_rows, int)
    free = iter(rng.permutation(num_blocks))
    for row, (q_len, kv_len) in enumerate(kind.rows):
        used = -(-kv_len // BLOCK_SIZE)
        tables[row, :used] = [next(free) for _ in range(used)]
        at = np.arange(kv_len - q_len, kv_len)
        mine = slice(q_starts[row], q_starts[row] + q_len)
        positions[mine], slots[mine] = at, tables[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        q_starts[row + 1 :], kv_lens[row] = mine.stop, kv_len
    num_decode = sum(q_len == 1 for q_len, _ in kind.rows)
    ragged = Ragged(*(np.asarray(x, np.int32) for x in (tables, q_starts, kv_lens, slots, num_decode)))
    picked = (q_starts[1 : len(kind.rows) + 1] - 1).astype(np.int32)
    return rng.integers(0, CONFIG.vocab_size, kind.num_tokens).astype(np.int32), positions, ragged, picked


if __name__ == "__main__":
    main()
