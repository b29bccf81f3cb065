"""Bugs to plant in the Triton kernels: each is a piece of their source, and what stands there instead."""

from pallas_kernels.kv_write import pallas_triton as kv_write
from pallas_kernels.paged_attention import cuts, walk
from pallas_kernels.paged_attention import pallas_triton as decode
from pallas_kernels.ragged_attention import pallas_triton as prefill
from tests.pallas_kernels.planting import Mutant

DECODE = {
    "sees one token too many": Mutant(walk.walk, "live = None if whole else keys < end", "live = keys <= end"),
    "sees one token too few": Mutant(walk.walk, "live = None if whole else keys < end", "live = keys < end - 1"),
    "takes a stale column of the block table": Mutant(
        walk._tile, "lax.shift_right_logical(keys, ", "lax.shift_right_logical(jnp.maximum(keys - 1, 0), "
    ),
    "reads another layer": Mutant(decode._context, "layer_ref[0]", "layer_ref[0] * 0"),
    "does not rescale its output": Mutant(walk._fold, "state.out * decay[:, None]", "state.out"),
    "does not rescale its total": Mutant(walk._fold, "state.total * decay", "state.total"),
    "takes the scales of another token": Mutant(
        walk._tile,
        "at = (blocks, context.layer, context.head, offsets)",
        "at = (blocks, context.layer, context.head, 0 * keys)",
    ),
    "takes K's scales for V's": Mutant(
        walk._tile, "in (context.k_scale_ref, context.v_scale_ref)", "in (context.k_scale_ref,) * 2"
    ),
    "caps before it scales": Mutant(walk.walk, "(how.scale if how.softcap else", "(1.0 if how.softcap else"),
    "takes a sink for a score in powers of two": Mutant(decode._combine_kernel, "[head] * LOG2_E", "[head]"),
    "does not rescale what it combines": Mutant(decode._combine_kernel, "out * decay +", "out +"),
    "loses a row's last pieces": Mutant(decode._combine_kernel, "live = pieces < end", "live = pieces < end - 1"),
    "forgets the window": Mutant(decode.attend_rows, "kv_lens - scoring.window", "kv_lens - kv_lens"),
    "has a window one too long": Mutant(decode.attend_rows, "kv_lens - scoring.window", "kv_lens - scoring.window - 1"),
    "cuts empty pieces": Mutant(cuts.cut, "_ceil_div(most, split.tile_kv) * split.tile_kv", "most"),
    "packs another group's heads": Mutant(decode._group, "context.head * group + index", "context.head + index"),
}
PREFILL = {
    "sees the next token": Mutant(prefill._kernel, "keys[None] <= positions", "keys[None] <= positions + 1"),
    "does not see itself": Mutant(prefill._kernel, "keys[None] <= positions", "keys[None] < positions"),
    "goes unmasked too far": Mutant(prefill._kernel, "jnp.minimum(first_position + 1, last)", "last"),
    "has a window one too long": Mutant(prefill._kernel, "> positions - window", ">= positions - window"),
    "mixes up tokens and heads": Mutant(prefill._kernel, "lax.rem(packed, group)", "lax.rem(within, group)"),
    "forgets the rows' last tiles": Mutant(prefill._tiles_of, "-(-lengths // tile_q)", "lengths // tile_q"),
    "leaves padding as it was": Mutant(
        prefill._tiles_of, "q_starts[1:], num_tokens)", "q_starts[1:], ragged.q_starts[-1])"
    ),
}
WRITE = {
    "writes one slot too far": Mutant(kv_write._kernel, "jax.lax.rem(slots, block_size)", "slots % block_size ^ 1"),
    "writes slots past the cache": Mutant(
        kv_write._kernel, "jnp.where(is_real, jax.lax.div(slots, block_size), num_blocks)", "0 * slots"
    ),
    "rounds down": Mutant(kv_write._round, "low + 1, low)", "low, low)"),
    "takes the largest number, not the largest size": Mutant(kv_write._quantise, "jnp.max(jnp.abs(x)", "jnp.max((x)"),
}
