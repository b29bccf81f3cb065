"""(b) The peer: PyTorch's scaled dot-product attention on the same shapes, K and V contiguous, timed by CUDA events."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from scripts.gpu_check.checks import Check, Figures, Skipped
from scripts.gpu_check.shapes import DECODE, PREFILL, TINY_DECODE, TINY_PREFILL


def checks(*, stand_in: bool) -> Iterator[Check]:
    for name, (shape, rows, _, kv) in (TINY_DECODE if stand_in else DECODE).items():
        if kv is None:
            yield Check(f"decode torch {name}", partial(attention, shape, rows, stand_in))
    for name, (shape, rows, _) in (TINY_PREFILL if stand_in else PREFILL).items():
        yield Check(f"prefill torch {name}", partial(attention, shape, rows, stand_in))


def attention(shape: Any, rows: list[tuple[int, int]], stand_in: bool) -> Figures:
    torch = import_torch(stand_in)
    device, dtype = ("cpu", torch.float32) if stand_in else ("cuda", torch.bfloat16)
    q_len, kv_len = rows[0]
    heads, kv_heads, head_dim, _ = shape
    q = torch.randn(len(rows), heads, q_len, head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(len(rows), kv_heads, kv_len, head_dim, device=device, dtype=dtype) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    taken_s = seconds(torch, lambda: attend(q, k, v, is_causal=q_len > 1, enable_gqa=True), stand_in)
    if q_len == 1:
        num_bytes = 2 * k.numel() * k.element_size()
        return {"us": taken_s * 1e6, "TB/s": num_bytes / taken_s / 1e12}
    flops = 4 * heads * head_dim * len(rows) * q_len * (q_len + 1) / 2
    return {"ms": taken_s * 1e3, "TFLOP/s": flops / taken_s / 1e12}


def import_torch(stand_in: bool) -> Any:
    try:
        import torch
    except ImportError as error:
        raise Skipped(f"torch is not installed: {error}") from error
    if not stand_in and not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")
    return torch


def seconds(torch: Any, call: Callable[[], Any], stand_in: bool) -> float:
    """The median of 20 runs between CUDA events; on a CPU by the clock."""
    import time

    for _ in range(3):
        call()
    found = []
    for _ in range(3 if stand_in else 20):
        if stand_in:
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)
