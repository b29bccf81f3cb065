"""Bugs to plant in the Mosaic GPU kernels: each is a line of their source, and what stands there instead."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from pallas_kernels.mosaic import warpgroups
from pallas_kernels.paged_attention import pallas_mosaic as paged_attention
from pallas_kernels.ragged_attention import mosaic_kernel as ragged_attention


class Mutant(NamedTuple):
    module: Any
    function: str
    old: str
    new: str


_FREE_K = "plgpu.barrier_arrive(k_ring.free.at[slot])"
_FREE_V = "plgpu.barrier_arrive(v_ring.free.at[slot])"
_PRODUCTS = "product = wgs.products(q, k_ring.tiles.at[slot], tile_kv, interpret)"
_WEIGH = "out = wgs.weigh(state.out, weights, v_ring.tiles.at[slot], staged, interpret)"
_WAIT_FREE = "pl.when(step >= slots)(lambda: plgpu.barrier_wait(ring.free.at[slot]))"

# The race detector must see these. (What it can't see is a write that is not committed before wgmma reads it.)
RACES = {
    "frees K before it multiplies": Mutant(
        paged_attention, "_attend", f"{_PRODUCTS}\n    {_FREE_K}", f"{_FREE_K}\n    {_PRODUCTS}"
    ),
    "frees V before it multiplies": Mutant(
        paged_attention, "_attend", f"{_WEIGH}\n    {_FREE_V}", f"{_FREE_V}\n    {_WEIGH}"
    ),
    "clears V before it landed": Mutant(warpgroups, "fill_slot_cleared", "plgpu.barrier_wait(landed)", "pass"),
    "stores what it did not commit": Mutant(paged_attention, "_store", "plgpu.commit_smem()", "pass"),
}
# A barrier that completes twice with nobody waiting between is refused by the interpreter.
UNAWAITED = {
    "does not wait for K": Mutant(paged_attention, "_attend", "plgpu.barrier_wait(k_ring.ready.at[slot])", "pass"),
    "does not wait for V": Mutant(paged_attention, "_attend", "plgpu.barrier_wait(v_ring.ready.at[slot])", "pass"),
    "fills slots that are not free": Mutant(warpgroups, "_when_free", _WAIT_FREE, "pass"),
}
# These give wrong numbers: the blocks' unused slots hold NaN.
WRONG = {
    "does not clear V": Mutant(
        warpgroups, "_clear_dead", "jnp.where(is_live, values, jnp.zeros_like(values))", "values"
    ),
    "does not mask the last tile": Mutant(
        paged_attention, "_attend", "seen = (positions >= live[0]) & (positions < live[1])", "seen = None"
    ),
}
# Of the prefill kernel: of two consumers, one without queries must not free slots that the other reads.
HASTY = {
    "passes over tiles without waiting": Mutant(
        ragged_attention, "_pass", "plgpu.barrier_wait(consumer.k_ring.ready.at[slot])", "pass"
    ),
}
MUTANTS = {**RACES, **UNAWAITED, **WRONG, **HASTY}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """The kernels with that bug; without a name as they are."""
    if name is None:
        yield
        return
    mutant = MUTANTS[name]
    sound = getattr(mutant.module, mutant.function)
    source = inspect.getsource(sound)
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.function} has not just one {mutant.old!r} to replace")
    jax.clear_caches()  # of what was traced before
    exec(compile(source.replace(mutant.old, mutant.new), f"<{name}>", "exec"), vars(mutant.module))
    try:
        yield
    finally:
        setattr(mutant.module, mutant.function, sound)
        jax.clear_caches()
