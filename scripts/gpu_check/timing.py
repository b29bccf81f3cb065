"""Time on the device without the host's share: the slope between few calls in a row and twice as many.

Calls are enqueued without waiting and follow one another on the device; the wait at the end, and whatever a call costs
once, is in both times and falls out. The median of several slopes is taken; where noise makes that absurd, the whole
time of the fastest run.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def per_call_s(step: Callable[[Any], Any], state: Any, *, least_s: float = 0.05, repeats: int = 5) -> float:
    """Seconds a call of `state = step(state)`; the state may be donated. The device must be idle."""
    state = jax.block_until_ready(step(jax.block_until_ready(step(state))))
    num_calls, took_s = 1, 0.0
    while took_s < least_s:
        num_calls *= 2
        took_s, state = _run(step, state, num_calls)
    slopes, whole = [], []
    for _ in range(repeats):
        few_s, state = _run(step, state, num_calls)
        many_s, state = _run(step, state, 2 * num_calls)
        slopes.append((many_s - few_s) / num_calls)
        whole.append(many_s / (2 * num_calls))
    slope = statistics.median(slopes)
    return slope if slope > 0 else min(whole)


def _run(step: Callable[[Any], Any], state: Any, num_calls: int) -> tuple[float, Any]:
    began = time.perf_counter()
    for _ in range(num_calls):
        state = step(state)
    jax.block_until_ready(state)
    return time.perf_counter() - began, state
