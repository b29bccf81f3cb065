"""(d) Copies between the device and the host, by both ways that a pool of the host may lie: pinned arrays and plain
memory, beside the bandwidth that a single large pinned array gets."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from scripts.gpu_check.checks import Check, Figures, Skipped

NUM_BYTES = {False: 128 * 2**20, True: 2**16}
NUM_RUNS = 7


def checks(*, stand_in: bool) -> Iterator[Check]:
    for kind in ("pinned_host", "plain"):
        yield Check(f"{kind} memory", partial(both_ways, kind, NUM_BYTES[stand_in]))
    yield Check("pinned_host memory in one array", partial(both_ways, "pinned_host", 8 * NUM_BYTES[stand_in]))


def both_ways(kind: str, num_bytes: int) -> Figures:
    device = jax.devices()[0]
    if kind != "plain" and kind not in {memory.kind for memory in device.addressable_memories()}:
        raise Skipped(f"{device} has no {kind} memory")
    here = jax.device_put(jnp.zeros(num_bytes, jnp.uint8), device)
    if kind == "plain":
        room = np.zeros(num_bytes, np.uint8)
        out: Callable[[Any], Any] = partial(_into, room)
        there: Any = room
    else:
        out = partial(jax.device_put, device=SingleDeviceSharding(device, memory_kind=kind))
        there = jax.block_until_ready(out(here))
    back = partial(jax.device_put, device=SingleDeviceSharding(device, memory_kind=device.default_memory().kind))
    # A fresh array each time, since JAX keeps the host's copy of one that it has brought there.
    fresh = jax.jit(lambda x, i: x + i)
    sources = [jax.block_until_ready(fresh(here, jnp.uint8(i))) for i in range(NUM_RUNS)]
    found = {"out GB/s": num_bytes / min(_seconds(out, x) for x in sources) / 1e9}
    found["back GB/s"] = num_bytes / min(_seconds(back, there) for _ in range(NUM_RUNS)) / 1e9
    began = time.perf_counter()
    waiting = out(fresh(here, jnp.uint8(9)))
    found["to enqueue us"] = (time.perf_counter() - began) * 1e6
    jax.block_until_ready(waiting)
    return found


def _into(room: np.ndarray, source: jax.Array) -> np.ndarray:
    room[:] = np.asarray(source)
    return room


def _seconds(copy: Callable[[Any], Any], value: Any) -> float:
    began = time.perf_counter()
    jax.block_until_ready(copy(value))
    return time.perf_counter() - began
