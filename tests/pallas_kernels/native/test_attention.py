"""Native attention at every level of instructions: precision, odd shapes, contexts cut and shared, equal bits."""

import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models import rope
from pallas_kernels import native as library
from pallas_kernels.ragged_attention import AttentionShape, native
from tests.pallas_kernels.cases import MIXES, NUM_BLOCKS, expected, laid_out, make_case, run

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
ODD_SHAPES = (
    AttentionShape(num_heads=3, num_kv_heads=3, head_dim=100, block_size=8),
    AttentionShape(num_heads=8, num_kv_heads=1, head_dim=33, block_size=24),
    AttentionShape(num_heads=8, num_kv_heads=2, head_dim=32, block_size=40),
    AttentionShape(num_heads=4, num_kv_heads=1, head_dim=80, block_size=64),
    AttentionShape(num_heads=64, num_kv_heads=1, head_dim=16, block_size=16),
    AttentionShape(num_heads=2, num_kv_heads=2, head_dim=256, block_size=32),
)
GROUPED = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=64, block_size=16)
STATM = Path("/proc/self/statm")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [GROUPED, *ODD_SHAPES], ids=str)
def test_every_level_agrees_with_loops_in_float64(level, shape, dtype):
    for seed, mix in enumerate(MIXES.values()):
        case = rounded(make_case(shape, mix, seed), dtype)
        got, wanted = run(native.BACKEND, case, dtype, num_layers=2, layer=1), expected(case)
        np.testing.assert_allclose(got[0], wanted[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        np.testing.assert_array_equal(got[1], wanted[1].astype(np.float32))


@pytest.mark.parametrize("shape", [GROUPED, *ODD_SHAPES], ids=str)
def test_an_int8_cache_means_what_the_definition_says_at_every_level(level, shape):
    # Where bfloat16 is multiplied, queries and weights are rounded to it; the cache is the same to the bit.
    tolerance = 2e-2 if level == "avx512_bf16" else 5e-5
    for seed, mix in enumerate(MIXES.values()):
        case = make_case(shape, mix, seed)
        got = run(native.BACKEND, case, "float32", num_layers=2, layer=1, kv_dtype="int8")
        wanted = expected(case, kv_dtype="int8")
        np.testing.assert_allclose(got[0], wanted[0], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(got[1], wanted[1], rtol=1e-6)


@pytest.mark.parametrize("kv_len", [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257])
def test_lengths_around_the_edges_of_tiles_blocks_and_pieces(level, kv_len):
    for mix in (((1, kv_len),), ((min(kv_len, 48), kv_len),)):
        case = make_case(GROUPED, mix)
        np.testing.assert_allclose(run(native.BACKEND, case, "float32")[0], expected(case)[0], atol=1e-5)
        got, wanted = run(native.BACKEND, case, "float32", kv_dtype="int8"), expected(case, kv_dtype="int8")
        np.testing.assert_allclose(got[0], wanted[0], atol=2e-2)


def test_random_batches_agree_with_loops(level):
    rng = np.random.default_rng(2)
    for seed in range(12):
        shape = AttentionShape(2 * int(rng.integers(1, 9)), 2, int(rng.integers(1, 40)), 8 * int(rng.integers(1, 9)))
        case = make_case(shape, random_mix(rng, shape.block_size), seed)
        np.testing.assert_allclose(run(native.BACKEND, case, "float32")[0], expected(case)[0], atol=2e-5)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_a_row_has_the_same_bits_alone_in_a_mix_and_in_chunks(level, dtype, kv_dtype):
    mixed = make_case(GROUPED, ((1, 300), (1, 40), (20, 150), (17, 17)))
    outs = run(native.BACKEND, mixed, dtype, kv_dtype=kv_dtype)[0]
    for row in range(4):
        for tokens in halves(mixed, row):
            alone = run(native.BACKEND, only(mixed, row, tokens), dtype, kv_dtype=kv_dtype)[0]
            np.testing.assert_array_equal(alone[: len(tokens)], outs[tokens])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_shared", [8, 9, 16, 18])
def test_rows_that_share_leading_blocks_get_the_bits_that_they_get_alone(level, dtype, num_shared):
    case = sharing(make_case(GROUPED, ((1, 300),) * 3 + ((1, 100),)), num_shared, rows=(0, 1, 2))
    outs = run(native.BACKEND, case, dtype)[0]
    np.testing.assert_allclose(outs, expected(rounded(case, dtype))[0], atol=TOLERANCE[dtype])
    for row in range(4):
        alone = run(native.BACKEND, only(case, row, np.array([row])), dtype)[0]
        np.testing.assert_array_equal(alone[0], outs[row])


def test_a_cache_that_is_not_aliased_is_refused():
    case = make_case(GROUPED, MIXES["decodes"])
    with pytest.raises(Exception, match="the cache must be updated in place"):
        jax.block_until_ready(call(case, aliases={}))


@pytest.mark.parametrize(("num_leaves", "aliases"), [(2, None), (3, None), (4, {8: 1, 9: 2})])
def test_an_int8_cache_without_scales_of_its_own_to_update_is_refused(num_leaves, aliases):
    case = make_case(GROUPED, MIXES["decodes"])
    with pytest.raises(Exception, match="has scales of its tokens, updated in place"):
        jax.block_until_ready(call(case, aliases, kv_dtype="int8", num_leaves=num_leaves))


@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell what memory a process has")
def test_a_cache_takes_no_memory_before_it_is_written():
    before = resident_bytes()
    cache = jax.block_until_ready(native.init_cache(4096, 16, 3, 64, "bfloat16", num_layers=30))
    assert cache.k.nbytes + cache.v.nbytes > 2**30
    assert resident_bytes() - before < 2**27


def test_an_int8_cache_and_its_scales_stay_where_they_are():
    case = make_case(GROUPED, MIXES["decodes"])
    cache = native.init_cache(NUM_BLOCKS, 16, 2, 64, "int8", num_layers=2)
    assert sum(leaf.nbytes for leaf in cache) == NUM_BLOCKS * 2 * native.block_bytes(16, 2, 64, jnp.int8)
    step = jax.jit(lambda c, *x: native.attend(*x, c, case.ragged, scale=1.0)[1], donate_argnums=0)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in cache]
    for _ in range(2):
        cache = step(cache, case.q, case.k, case.v)
        assert [leaf.unsafe_buffer_pointer() for leaf in cache] == pointers


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("block_tables", NUM_BLOCKS, "row 0 has block 64 of 64"),
        ("slots", NUM_BLOCKS * 16, "slot 1024 is outside the cache"),
        ("kv_lens", 0, "row 0 has kv_len 0, which is below its 1 query tokens or beyond its table"),
        ("kv_lens", NUM_BLOCKS * 16 + 1, "row 0 has kv_len 1025"),
        ("q_starts", -1, "q_starts must begin with 0"),
    ],
)
def test_ids_and_counts_that_would_leave_the_cache_are_refused(field, value, complaint):
    case = make_case(GROUPED, MIXES["decodes"])
    first = (0,) * getattr(case.ragged, field).ndim
    ragged = case.ragged._replace(**{field: getattr(case.ragged, field).at[first].set(value)})
    with pytest.raises(Exception, match=complaint):
        jax.block_until_ready(call(case._replace(ragged=ragged)))


def test_queries_may_be_of_another_type_than_the_cache():
    case = rounded(make_case(GROUPED, MIXES["decodes and chunks"]), "bfloat16")
    plain = case.history[:, :, None].astype(jnp.bfloat16)
    out, _ = jax.jit(partial(native.attend, scale=case.scale))(*case[:3], laid_out(native.BACKEND, plain), case.ragged)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected(case)[0], atol=2e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_turning_within_the_kernel_equals_turning_before_it(level, dtype):
    shape = GROUPED if dtype == "bfloat16" else AttentionShape(num_heads=3, num_kv_heads=1, head_dim=20, block_size=8)
    case = make_case(shape, MIXES["decodes and chunks"])
    q, k, v = (x.astype(dtype) for x in case[:3])
    turns = rope.tables(jnp.arange(len(q)), rope.inverse_frequencies(shape.head_dim, 100.0, None))
    cache = laid_out(native.BACKEND, case.history[:, :, None].astype(dtype))
    options = {"scale": case.scale, "layer": 0}
    turned = (rope.rotate(q, *turns), rope.rotate(k, *turns), v)
    expected, _ = jax.jit(partial(native.attend, **options))(*turned, cache, case.ragged)
    qkv = jnp.concatenate([q, k, v], axis=1)
    out, _ = jax.jit(partial(native.attend_turned, **options))(qkv, turns, cache, case.ragged)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, expected)), atol=TOLERANCE[dtype])
    unturned, _ = jax.jit(partial(native.attend, **options))(q, k, v, cache, case.ragged)
    assert np.abs(np.asarray(unturned - expected, np.float32)).max() > 0.1


def resident_bytes():
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def call(case, aliases=None, kv_dtype=None, num_leaves=None):
    cache = jax.tree.leaves(laid_out(native.BACKEND, case.history[:, :, None], kv_dtype))[:num_leaves]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (case.q, *cache)]
    qkv, none = jnp.concatenate(case[:3], axis=1), np.zeros(0, np.float32)
    aliases = {8 + i: 1 + i for i in range(len(cache))} if aliases is None else aliases
    attend = jax.ffi.ffi_call(native.TARGET, shapes, input_output_aliases=aliases)
    options = {"block_size": np.int32(GROUPED.block_size), "scale": np.float32(1)}
    operands = (qkv, none, none, *case.ragged[:4], jnp.int32(0), *cache)
    return jax.jit(lambda *x: attend(*x, **options))(*operands)


def rounded(case, dtype):
    """The case with numbers that `dtype` holds, still in float32."""
    q, k, v = (x.astype(dtype).astype(jnp.float32) for x in case[:3])
    return case._replace(q=q, k=k, v=v, history=case.history.astype(jnp.dtype(dtype)).astype(np.float32))


def random_mix(rng, block_size):
    """Decodes, then chunks, within what a case has room for."""
    most = min(400, 5 * block_size)
    decodes = [(1, int(n)) for n in rng.integers(1, most, rng.integers(0, 6))]
    chunks = [(int(n), int(n + rng.integers(0, most))) for n in rng.integers(1, 10, rng.integers(0, 4))]
    return (*decodes, *chunks)


def halves(case, row):
    """The row's packed tokens at once, and the later half of them, which is what a second chunk would be."""
    first, end = np.asarray(case.ragged.q_starts)[row : row + 2]
    return np.arange(first, end), np.arange((first + end) // 2, end)


def only(case, row, tokens):
    """The last `tokens` of a row as a batch; what comes before them is cached already."""
    pick = np.concatenate([tokens, np.zeros(len(case.q) - len(tokens), int)])
    slots, real = np.asarray(case.ragged.slots), np.arange(len(pick)) < len(tokens)
    rows, first = case.ragged.kv_lens.shape[0], np.arange(case.ragged.kv_lens.shape[0]) == 0
    table = jnp.where(first[:, None], case.ragged.block_tables[row], -1)
    q_starts = jnp.where(np.arange(rows + 1) == 0, 0, len(tokens)).astype(jnp.int32)
    kv_lens = jnp.where(first, case.ragged.kv_lens[row], 0)
    ragged = case.ragged._replace(
        block_tables=table, q_starts=q_starts, kv_lens=kv_lens, slots=jnp.where(real, slots[pick], -1)
    )
    history = case.history.reshape(2, -1, *case.history.shape[3:]).copy()
    for which, new in enumerate((case.k, case.v)):
        history[which, slots[slots >= 0]] = np.asarray(new)[slots >= 0]
    return case._replace(
        q=case.q[pick], k=case.k[pick], v=case.v[pick], history=history.reshape(case.history.shape), ragged=ragged
    )


def sharing(case, num_shared, rows):
    """`rows` with the first one's leading blocks in place of their own."""
    tables = np.array(case.ragged.block_tables)
    tables[list(rows), :num_shared] = tables[rows[0], :num_shared]
    return case._replace(ragged=case.ragged._replace(block_tables=jnp.asarray(tables)))
