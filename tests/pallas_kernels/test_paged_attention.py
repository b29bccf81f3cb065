"""Decode kernels, interpreted, against float64 on batches that are new each run; the definition too."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import AttentionShape
from pallas_kernels.paged_attention import pallas_triton, reference
from pallas_kernels.paged_attention.cuts import cut
from pallas_kernels.paged_attention.shapes import LLAMA_8B
from pallas_kernels.paged_attention.tiles import DecodeTiles, decode_tiles
from tests.pallas_kernels.decodes import expected, fresh_rng, make_decodes, relative_error, to_cache

LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 1e-2}
SMALL = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=32, block_size=16)
# Few tokens a piece, so that short contexts are cut too.
CUT = DecodeTiles(size=16, tile_kv=16, num_warps=4, num_stages=3, min_piece=16, num_programs=12, tile_pieces=2)
# Contexts of nothing, of one token, around the edges of blocks, tiles and pieces, and one long among short ones.
LENGTHS = (0, 1, 15, 16, 17, 0, 31, 32, 33, 48, 63, 64, 65, 500, 1, 0)
SINKS = np.linspace(-2, 4, SMALL.num_heads, dtype=np.float32)
VARIANTS = {
    "plain": {},
    "a window": {"window": 20},
    "a window of one": {"window": 1},
    "a soft-cap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "int8": {"kv_dtype": "int8"},
    "float8": {"kv_dtype": "float8_e4m3fn"},
    "all": {"window": 37, "softcap": 2.0, "sinks": SINKS, "kv_dtype": "int8"},
}


def check(attend, shape, kv_lens, max_len, dtype="float32", **variant):
    """Attend to a fresh batch and compare."""
    batch = make_decodes(fresh_rng(), shape, kv_lens, max_len, dtype)
    kv_dtype = variant.pop("kv_dtype", None)
    cache, scale = to_cache(batch, dtype, kv_dtype), shape.head_dim**-0.5
    attend = jax.jit(partial(attend, scale=scale, layer=1, **variant))
    tables, kv_lens = (jnp.asarray(x, jnp.int32) for x in (batch.tables, batch.kv_lens))
    out = attend(jnp.asarray(batch.q, dtype), cache, tables, kv_lens)
    wanted = expected(batch, scale, kv_dtype=kv_dtype, **variant)
    assert out.dtype == jnp.dtype(dtype)
    assert not np.asarray(out)[np.asarray(kv_lens) == 0].any()
    # Weights times V's scales may be too small for float16, so that product is bfloat16's.
    rounds_as = "bfloat16" if kv_dtype and dtype == "float16" else dtype
    assert relative_error(out, wanted) < LIMITS[rounds_as]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_definition_agrees_with_float64(variant):
    check(reference.attend, SMALL, LENGTHS, 512, **variant)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_kernel_agrees_on_any_lengths_and_variant(variant):
    check(partial(pallas_triton.attend_interpreted, tiles=CUT), SMALL, LENGTHS, 512, **variant)


def test_rows_that_are_not_worth_cutting_go_whole():
    check(pallas_triton.attend_interpreted, SMALL, LENGTHS, 512, **VARIANTS["all"])


@pytest.mark.parametrize(
    ("shape", "dtype", "kv_dtype"),
    [
        (AttentionShape(4, 4, 64, 8), "bfloat16", None),
        (AttentionShape(16, 1, 80, 32), "float16", "float8_e4m3fn"),
        (AttentionShape(10, 5, 96, 64), "bfloat16", "int8"),
        (AttentionShape(4, 2, 256, 16), "float32", None),
        (AttentionShape(7, 1, 100, 8), "float32", "int8"),
        (AttentionShape(20, 1, 64, 16), "bfloat16", "float8_e4m3fn"),
    ],
    ids=str,
)
def test_the_kernel_agrees_on_any_shape_and_type(shape, dtype, kv_dtype):
    check(pallas_triton.attend_interpreted, shape, (300, 0, 1, 64), 1024, dtype, kv_dtype=kv_dtype)


@pytest.mark.parametrize("kv_lens", [(4096,), (1, 3000, 2, 3, 65, 0, 7, 64)], ids=["one row", "one long row"])
def test_a_llama_sized_context_is_spread_and_combined(kv_lens):
    check(pallas_triton.attend_interpreted, LLAMA_8B, kv_lens, 4096, "bfloat16")


def test_a_long_row_among_short_ones_is_cut_into_many_pieces_of_whole_tiles():
    lens = jnp.array([1, 30_000, 2, 0, 100], jnp.int32)
    cuts = cut((jnp.zeros_like(lens), lens), 8, decode_tiles(LLAMA_8B, 2))
    counts, starts = np.diff(cuts.row_starts), np.asarray(cuts.row_starts)
    assert counts[[0, 2, 3, 4]].tolist() == [1, 1, 0, 1] and counts[1] > 40
    widths = np.asarray(cuts.ends - cuts.firsts)[starts[1] : starts[2]]
    assert widths.sum() == 30_000 and not (widths[:-1] % 64).any() and widths.min() > 0
    assert len(cuts.rows) >= counts.sum()


def test_every_piece_of_a_row_holds_tokens_and_all_fit_whatever_the_lengths():
    rng = fresh_rng()
    for _ in range(40):
        lens = jnp.asarray(rng.integers(0, rng.integers(2, 2000), rng.integers(1, 9)), jnp.int32)
        first = jnp.asarray(rng.integers(0, 50, lens.shape), jnp.int32)
        cuts = cut((jnp.minimum(first, lens), lens), 2, CUT)
        num_pieces = int(cuts.row_starts[-1])
        assert num_pieces <= len(cuts.rows)
        widths = np.asarray(cuts.ends - cuts.firsts)
        assert (widths[:num_pieces] > 0).all() and not widths[num_pieces:].any()
        covered = np.bincount(np.asarray(cuts.rows)[:num_pieces], widths[:num_pieces], minlength=len(lens))
        np.testing.assert_array_equal(covered, lens - jnp.minimum(first, lens))


def test_a_row_that_is_no_number_keeps_it_to_itself():
    batch = make_decodes(fresh_rng(), SMALL, LENGTHS, 512, "float32")
    row = LENGTHS.index(33)
    broken = batch._replace(v=batch.v.copy())
    broken.v[batch.tables[row, 1], :, 2] = np.inf
    attend = jax.jit(partial(pallas_triton.attend_interpreted, scale=0.2, layer=1, tiles=CUT))
    tables, kv_lens = (jnp.asarray(x, jnp.int32) for x in (batch.tables, batch.kv_lens))
    clean, bad = (attend(jnp.asarray(x.q, "float32"), to_cache(x, "float32"), tables, kv_lens) for x in (batch, broken))
    assert not np.isfinite(bad[row]).any()
    np.testing.assert_array_equal(np.delete(bad, row, 0), np.delete(clean, row, 0))
