"""(d) A Llama-3-8B of random weights through the whole engine: prefill, decode, the gap between steps, swaps."""

import random
import time
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from pagedjax.core.effects import Fetch, SwapOut
from pagedjax.core.plan import Scatter, Tier
from pagedjax.core.request import SamplingParams
from pagedjax.engine.engine import Engine
from pagedjax.runtime import batch as batches
from pagedjax.runtime import copies
from scripts.gpu_check.checks import Check, Figures
from scripts.gpu_check.models import Made, make_engine
from scripts.gpu_check.shapes import GENERATED, LLAMA_8B, NUM_SEQS, PROMPTS, TINY
from scripts.gpu_check.timing import per_call_s

POLL_S = 30.0


def checks(*, stand_in: bool) -> Iterator[Check]:
    yield Check("made", partial(made, stand_in), 170.0)
    yield Check("prefill", partial(prefill, stand_in))
    yield Check("decode", partial(decode, stand_in))
    yield Check("swap", partial(swap, stand_in))
    yield Check("made without command buffers", partial(eager, stand_in), 120.0)


@cache
def _made(stand_in: bool, **options: Any) -> Made:
    if stand_in:
        limits = {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 64, "block_size": 8, "swap_space": 0.001}
        return make_engine(TINY, token_sizes=(4, 32), max_num_seqs=4, dtype="float32", **limits)
    limits = {"max_num_batched_tokens": 2048, "max_model_len": 8192, "swap_space": 4.0}
    sizes = {"token_sizes": (64, 512, 2048), "row_sizes": (16, 64)}
    return make_engine(LLAMA_8B, max_num_seqs=64, **sizes, **limits, **options)


def made(stand_in: bool) -> Figures:
    found = _made(stand_in)
    return {
        "load s": found.load_s,
        "warm-up s": found.warm_up_s,
        "programs": len(found.engine.runner.programs),
        "blocks": found.num_blocks,
        "activations MiB": None if found.activation_bytes is None else found.activation_bytes / 2**20,
        "attention": found.engine.runner._backend.name,
    }


def prefill(stand_in: bool) -> Figures:
    """Prompt tokens a second, prompts one behind the other; each is asked for one token."""
    engine, (num_prompts, length) = _made(stand_in).engine, PROMPTS[stand_in]
    _run(engine, _prompts(2, length, seed=1), 1)
    took_s = _run(engine, _prompts(num_prompts, length, seed=2), 1)
    return {"tokens/s": num_prompts * length / took_s}


def decode(stand_in: bool) -> Figures:
    """Output tokens a second of a full batch, and what part of a step the device did not compute."""
    engine, (length, num_tokens) = _made(stand_in).engine, GENERATED[stand_in]
    return _decode(engine, NUM_SEQS[stand_in], length, num_tokens, stand_in)


def _decode(engine: Engine, num_seqs: int, length: int, num_tokens: int, stand_in: bool) -> Figures:
    _run(engine, _prompts(num_seqs, length, seed=3), 4)
    before = {name: _seconds(engine, name) for name in ("schedule", "dispatch")}
    num_steps, decoding_s = _run_decodes(engine, _prompts(num_seqs, length, seed=4), num_tokens)
    host = {f"{name} us": (_seconds(engine, name) - was) / num_steps * 1e6 for name, was in before.items()}
    step_s = decoding_s / num_steps
    device_s = _device_step_s(engine, num_seqs, length + num_tokens // 2, stand_in)
    return {
        "tokens/s": num_seqs / step_s,
        "step ms": step_s * 1e3,
        "on the device ms": device_s * 1e3,
        "gap": max(1 - device_s / step_s, 0.0),
        **host,
        "recompiles": engine.runner.recompiles,
    }


def swap(stand_in: bool) -> Figures:
    """Blocks to the host and back; a context of 2k tokens out, another's row dispatched, and the first one back."""
    runner = _made(stand_in).engine.runner
    num_blocks = 8 if stand_in else 128  # 2k tokens
    moves = tuple((i, i) for i in range(num_blocks))
    num_bytes = num_blocks * _block_bytes(runner)
    out_s, back_s, switch_s = [], [], []
    for i in range(5):
        jax.block_until_ready(runner._caches)
        began = time.perf_counter()
        runner.swap_out(SwapOut(2 * i, Tier.HOST, moves))
        _dispatch_padding(runner)
        switch_s.append(time.perf_counter() - began)
        _wait(runner)
        out_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        runner.fetch(Fetch(2 * i + 1, Tier.HOST, tuple(range(num_blocks))))
        _wait(runner)
        scatter = Scatter(2 * i + 1, moves)
        pieces = runner._transfers.take(scatter.transfer_id)
        runner._caches = copies.scatter(runner.programs, runner._caches, pieces, scatter.pairs)
        jax.block_until_ready(runner._caches)
        back_s.append(time.perf_counter() - began)
    return {
        "out GB/s": num_bytes / min(out_s) / 1e9,
        "back GB/s": num_bytes / min(back_s) / 1e9,
        "switch ms": min(switch_s) * 1e3,
        "save and restore ms": (min(out_s) + min(back_s)) * 1e3,
    }


def eager(stand_in: bool) -> Figures:
    """The decode step on the device with each kernel launched by itself. (On a CPU there is no such thing.)"""
    if stand_in:
        return {"step ms": _device_step_s(_made(True).engine, 4, 10, True) * 1e3}
    whole = _device_step_s(_made(False).engine, 64, 256, False)
    engine = _made(False).engine
    engine.runner._caches = None  # two caches do not fit; this part ends here
    _made.cache_clear()
    del engine
    found = _made(False, enforce_eager=True)
    single = _device_step_s(found.engine, 64, 256, False)
    return {"step ms": single * 1e3, "with command buffers ms": whole * 1e3}


# --- the engine, by hand ----------------------------------------------------------------------------------------------


def _prompts(num_prompts: int, length: int, *, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(TINY.vocab_size) for _ in range(length)] for _ in range(num_prompts)]


def _add(engine: Engine, prompts: list[list[int]], num_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(engine.prepare(prompt, params, request_id=str(i)))


def _run(engine: Engine, prompts: list[list[int]], num_tokens: int) -> float:
    _add(engine, prompts, num_tokens)
    began = time.perf_counter()
    _finish(engine)
    return time.perf_counter() - began


def _finish(engine: Engine) -> int:
    """Step until all is done; gives the number of steps."""
    num_steps = 0
    while engine.has_work:
        for update in engine.step():
            if update.error is not None:
                raise update.error
        num_steps += 1
    return num_steps


def _run_decodes(engine: Engine, prompts: list[list[int]], num_tokens: int) -> tuple[int, float]:
    """(steps, seconds) from where each sequence has its first token to the end."""
    _add(engine, prompts, num_tokens)
    started: set[str] = set()
    while len(started) < len(prompts):
        started |= {update.request_id for update in engine.step() if update.error is None}
    began = time.perf_counter()
    num_steps = _finish(engine)
    return num_steps, time.perf_counter() - began


def _seconds(engine: Engine, phase: str) -> float:
    return float(engine.metrics.step_time[phase]._value.get())


def _device_step_s(engine: Engine, num_rows: int, kv_len: int, stand_in: bool) -> float:
    """Seconds of a decode step's programs, one behind the other without the host: forward, head, greedy sampler."""
    runner = engine.runner
    size = next(size for size in runner.shapes.token_sizes if size >= num_rows)
    packed = jax.device_put(_packed_decodes(engine, size, num_rows, kv_len))
    kind = "decode" if runner._backend.prefers_decode_programs else "step"
    forward, head, greedy = (
        runner.programs[kind, size],
        runner.programs["head", runner.shapes.row_sizes[-1]],
        runner.programs["greedy", runner.shapes.row_sizes[-1]],
    )
    fields = jax.device_put(np.tile(runner._slots.fields[runner._slots.num_slots], (runner.shapes.num_picked, 1)))

    def step(state: Any) -> Any:
        caches, last_ids = state
        _, picked, caches = forward(runner._parts.forward_leaves, caches, last_ids, packed)
        _, last_ids = greedy(head(runner._parts.head_leaves, picked), last_ids, fields)
        runner._caches, runner._last_ids = caches, last_ids
        return caches, last_ids

    return per_call_s(step, (runner._caches, runner._last_ids), least_s=0.001 if stand_in else 0.2)


def _packed_decodes(engine: Engine, size: int, num_rows: int, kv_len: int) -> np.ndarray:
    runner, block_size = engine.runner, engine.state.config.block_size
    packed = np.zeros(batches.packed_size(runner.shapes, size), np.int32)
    parts = batches.split(packed, runner.shapes, size)
    per_row = -(-kv_len // block_size)
    tables = np.arange(num_rows * per_row).reshape(num_rows, per_row) % engine.state.config.num_blocks
    parts.block_tables[:num_rows, :per_row] = tables
    parts.positions[:num_rows] = kv_len - 1
    parts.slots[:] = -1  # nothing is written: blocks may be shared here
    parts.q_starts[: num_rows + 1] = np.arange(num_rows + 1)
    parts.q_starts[num_rows + 1 :] = num_rows
    parts.kv_lens[:num_rows] = kv_len
    parts.num_decode_rows[0] = num_rows
    parts.picked[:num_rows] = np.arange(num_rows)
    return packed


def _dispatch_padding(runner: Any) -> None:
    """The smallest step, of padding alone: what a beneficiary's first step costs to enqueue."""
    size = runner.shapes.token_sizes[0]
    packed = np.zeros(batches.packed_size(runner.shapes, size), np.int32)
    batches.split(packed, runner.shapes, size).slots[:] = -1
    *_, runner._caches = runner.programs["step", size](
        runner._parts.forward_leaves, runner._caches, runner._last_ids, packed
    )


def _wait(runner: Any) -> None:
    for ended in runner.poll_transfers(POLL_S):
        if not ended.ok:
            raise RuntimeError(ended.error)


def _block_bytes(runner: Any) -> int:
    return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(runner._caches))
