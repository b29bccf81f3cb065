"""The numeric tests are not blind: each planted bug gives a wrong number, and no bug gives none.

A few of the bugs, since each compiles everything anew; `MUTANTS=all` in the environment plants them all.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import AttentionShape
from pallas_kernels.kv_blocks import init_blocks
from pallas_kernels.kv_write import pallas_triton as kv_write
from pallas_kernels.kv_write import reference as kv_write_reference
from pallas_kernels.paged_attention import pallas_triton as decode
from pallas_kernels.paged_attention.tiles import DecodeTiles
from pallas_kernels.ragged_attention import pallas_triton as prefill
from pallas_kernels.ragged_attention.tiles import PrefillTiles
from tests.pallas_kernels.cases import expected as expected_of_case
from tests.pallas_kernels.cases import make_case, run
from tests.pallas_kernels.decodes import expected, fresh_rng, make_decodes, relative_error, to_cache
from tests.pallas_kernels.planting import planted
from tests.pallas_kernels.triton_mutants import DECODE, PREFILL, WRITE

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=8)
# One piece at a time, so that a peak is always followed by others; a least piece that is no whole tile.
CUT = DecodeTiles(size=16, tile_kv=16, num_warps=4, num_stages=3, min_piece=20, num_programs=40, tile_pieces=1)
TILES = PrefillTiles(tile_q=8, size=16, tile_kv=16, num_warps=4, num_stages=2)
SINKS = np.array([2, -1, 3, 0], np.float32)
LIMIT = 1e-4
FEW = (
    "sees one token too many",
    "takes a stale column of the block table",
    "does not rescale its output",
    "takes the scales of another token",
    "sees the next token",
    "writes one slot too far",
)


def chosen(bugs):
    return [name for name in bugs if name in FEW or os.environ.get("MUTANTS") == "all"]


def decode_error() -> float:
    """Of rows of all kinds with a window, a soft-cap, sinks and a quantised cache."""
    kv_lens, options = (0, 1, 16, 17, 100, 33, 70), {"window": 90, "softcap": 2.0, "sinks": SINKS}
    batch = make_decodes(fresh_rng(), SHAPE, kv_lens, 128, "float32")
    attend = jax.jit(partial(decode.attend_interpreted, scale=0.5, layer=1, tiles=CUT, **options))
    tables, lens = jnp.asarray(batch.tables, jnp.int32), jnp.asarray(kv_lens, jnp.int32)
    out = attend(jnp.asarray(batch.q, "float32"), to_cache(batch, "float32", "int8"), tables, lens)
    return relative_error(out, expected(batch, 0.5, kv_dtype="int8", **options))


def prefill_error(window: int | None = None) -> float:
    """Of chunks at the start of their prompts and later, decodes and padding among them."""
    case = make_case(SHAPE, ((1, 30), (19, 60), (16, 16)), int(fresh_rng().integers(2**31)))
    # Padding's NaN in the output must not be left there.
    out, _ = run(prefill.INTERPRETED, case, jnp.float32, window=window, tiles=TILES)
    return relative_error(out, expected_of_case(case, window=window)[0])


def write_error() -> float:
    rng = fresh_rng()
    k, v = jnp.asarray(rng.standard_normal((2, 9, 2, 16)), jnp.float32)
    cache = init_blocks(3, 8, 2, 16, "int8")
    slots = jnp.asarray([*rng.permutation(24)[:6], -1, 24, 1000], jnp.int32)
    got = jax.jit(kv_write.write_interpreted)(k, v, cache, slots)
    wanted = kv_write_reference.write(k, v, cache, slots)
    return max(float(jnp.abs(a - b).max()) for a, b in zip(map(jnp.float32, got), map(jnp.float32, wanted)))


def test_sound_kernels_are_right():
    assert decode_error() < LIMIT
    assert max(prefill_error(), prefill_error(window=20)) < LIMIT
    assert write_error() < LIMIT


@pytest.mark.parametrize("bug", chosen(DECODE))
def test_a_bug_in_decode_is_caught(bug):
    with planted(DECODE[bug]):
        assert not decode_error() < LIMIT


@pytest.mark.parametrize("bug", chosen(PREFILL))
def test_a_bug_in_prefill_is_caught(bug):
    window = 20 if "window" in bug else None
    with planted(PREFILL[bug]):
        assert not prefill_error(window) < LIMIT


@pytest.mark.parametrize("bug", chosen(WRITE))
def test_a_bug_in_writing_is_caught(bug):
    with planted(WRITE[bug]):
        assert not write_error() < LIMIT
