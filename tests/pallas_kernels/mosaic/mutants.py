"""Bugs to plant in the Mosaic GPU kernels, by the job (`test_interpreted`) that must show them."""

from pallas_kernels.mosaic import warpgroups
from pallas_kernels.paged_attention import pallas_mosaic as paged_attention
from pallas_kernels.ragged_attention import mosaic_kernel, pallas_mosaic
from tests.pallas_kernels.planting import Mutant

_FREE_K = "plgpu.barrier_arrive(k_ring.free.at[slot])"
_FREE_V = "plgpu.barrier_arrive(v_ring.free.at[slot])"
_PRODUCTS = "product = wgs.products(q, k_ring.tiles.at[slot], tile_kv, interpret)"
_WEIGH = "out = wgs.weigh(state.out, weights, v_ring.tiles.at[slot], staged, interpret)"
_WAIT_FREE = "pl.when(step >= slots)(lambda: plgpu.barrier_wait(ring.free.at[slot]))"

# The race detector must see these. (What it can't see is a write that is not committed before wgmma reads it.)
RACES = {
    "frees K before it multiplies": Mutant(
        paged_attention._attend, f"{_PRODUCTS}\n    {_FREE_K}", f"{_FREE_K}\n    {_PRODUCTS}"
    ),
    "frees V before it multiplies": Mutant(
        paged_attention._attend, f"{_WEIGH}\n    {_FREE_V}", f"{_FREE_V}\n    {_WEIGH}"
    ),
    "clears V before it landed": Mutant(warpgroups.fill_slot_cleared, "plgpu.barrier_wait(landed)", "pass"),
    "stores what it did not commit": Mutant(paged_attention._store, "plgpu.commit_smem()", "pass"),
}
# A barrier that completes twice with nobody waiting between is refused by the interpreter.
UNAWAITED = {
    "does not wait for K": Mutant(paged_attention._attend, "plgpu.barrier_wait(k_ring.ready.at[slot])", "pass"),
    "does not wait for V": Mutant(paged_attention._attend, "plgpu.barrier_wait(v_ring.ready.at[slot])", "pass"),
    "fills slots that are not free": Mutant(warpgroups._when_free, _WAIT_FREE, "pass"),
}
# These give wrong numbers: the blocks' unused slots hold NaN.
WRONG = {
    "does not clear V": Mutant(warpgroups._clear_dead, "jnp.where(is_live, values, jnp.zeros_like(values))", "values"),
    "does not mask the last tile": Mutant(
        paged_attention._attend, "seen = (positions >= live[0]) & (positions < live[1])", "seen = None"
    ),
    "sees one token too many": Mutant(paged_attention._attend, "positions < live[1]", "positions <= live[1]"),
    "does not rescale its output": Mutant(
        warpgroups.advance, "state.out * lax.broadcast_in_dim(decay, state.out.shape, [0])", "state.out"
    ),
}
# Of the prefill kernel: of two consumers, one without queries must not free slots that the other reads.
HASTY = {
    "passes over tiles without waiting": Mutant(
        mosaic_kernel._pass, "plgpu.barrier_wait(consumer.k_ring.ready.at[slot])", "pass"
    ),
}
# Of chunks that share tiles: wrong numbers, or stores that race with another row's.
SHARED = {
    "goes unmasked too far": Mutant(mosaic_kernel._spans, "begin + 1) // tile_kv", "begin + 2) // tile_kv"),
    "does not see itself": Mutant(mosaic_kernel._seen, "columns <= lax", "columns < lax"),
    "forgets the rows' last tiles": Mutant(
        mosaic_kernel._spans,
        "pl.cdiv(piece.position + end, jnp.int32(tile_kv))",
        "((piece.position + end) // tile_kv)",
    ),
    "stores a token of the next row": Mutant(
        mosaic_kernel._store, "piece.end - consumer.index", "piece.end + 1 - consumer.index"
    ),
    "does not wait for its queries": Mutant(mosaic_kernel.kernel, "plgpu.barrier_wait(q_ready.at[warpgroup])", "pass"),
    "reads another layer": Mutant(mosaic_kernel.kernel, "layer_ref[0], k_ref.shape", "layer_ref[0] * 0, k_ref.shape"),
    "leaves the last round of work": Mutant(
        mosaic_kernel._schedule, "rounds + (index_of(rounds) < total).astype(jnp.int32)", "rounds"
    ),
}
# Of chunks in a window, with sinks.
WINDOWED = {
    "has a window one too long": Mutant(mosaic_kernel._seen, "columns > lax", "columns >= lax"),
    "takes a sink for a score in powers of two": Mutant(mosaic_kernel._with_sink, "sink * wgs.LOG2_E", "sink"),
}
# Of a whole step: of two KV heads each has its own, and the step's tokens are written first.
STEP = {
    "reads the first KV head": Mutant(mosaic_kernel.kernel, "head // (q_ref.shape[1] // kv_heads)", "head * 0"),
    "writes nothing": Mutant(
        pallas_mosaic.attend, "cache = kv_write.write(k, v, cache, ragged.slots, layer=layer)", "pass"
    ),
    "takes chunks for decodes": Mutant(
        pallas_mosaic.attend, "jnp.where(is_decode, jnp.arange(num_decodes), q.shape[0])", "jnp.arange(num_decodes)"
    ),
}
MUTANTS = {**RACES, **UNAWAITED, **WRONG, **HASTY, **SHARED, **WINDOWED, **STEP}
