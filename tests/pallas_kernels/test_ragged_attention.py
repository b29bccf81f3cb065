"""The definition against plain loops, every backend against the definition, NaN wherever nothing may be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels.native import unavailable
from pallas_kernels.ragged_attention import AttentionShape, KVBlocks, native, pallas_triton, reference, xla
from pallas_kernels.ragged_attention.shapes import MODELS, SMALL
from pallas_kernels.ragged_attention.tiles import XlaTiles
from tests.pallas_kernels.cases import MIXES, NUM_BLOCKS, TOKENS, expected, make_case, run
from tests.pallas_kernels.decodes import fresh_rng, relative_error

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, block_size=16)
NATIVE = pytest.param(native.BACKEND, marks=pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())))
BACKENDS = [xla.BACKEND, pallas_triton.INTERPRETED, NATIVE]
VARIANT_BACKENDS = [reference.BACKEND, xla.BACKEND, pallas_triton.INTERPRETED]
SINKS = np.linspace(-1, 3, SHAPE.num_heads, dtype=np.float32)
VARIANTS = {
    "a window": {"window": 20},
    "a window of one": {"window": 1},
    "a soft-cap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "int8": {"kv_dtype": "int8"},
    "float8": {"kv_dtype": "float8_e4m3fn"},
    "all": {"window": 37, "softcap": 2.0, "sinks": SINKS, "kv_dtype": "int8"},
}
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
by_name = {"ids": lambda x: x.name}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_the_definition_agrees_with_loops_over_tokens(mix):
    case = make_case(SHAPE, mix)
    for got, wanted in zip(run(reference.BACKEND, case, jnp.float32), expected(case)):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS, **by_name)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_backends_agree_on_any_mix_of_rows(backend, mix):
    check(backend, make_case(SHAPE, mix), "float32")


@pytest.mark.parametrize("backend", BACKENDS, **by_name)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_backends_agree_on_any_shape(backend, shape):
    check(backend, make_case(shape, MIXES["decodes and chunks"]), "float32")


@pytest.mark.parametrize("backend", BACKENDS, **by_name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_backends_agree_in_half_precision(backend, dtype):
    check(backend, make_case(SMALL[1], MIXES["decodes and chunks"]), dtype)


@pytest.mark.parametrize("backend", VARIANT_BACKENDS, **by_name)
@pytest.mark.parametrize("mix", ["decodes and chunks", "one long among many short"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variants_agree_with_loops_over_tokens(backend, mix, variant):
    case = make_case(SHAPE, MIXES[mix])
    got, wanted = run(backend, case, jnp.float32, **variant), expected(case, **variant)
    np.testing.assert_allclose(got[0], wanted[0], atol=5e-5)
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "limit", "options"),
    [("bfloat16", 2e-2, {}), ("bfloat16", 2e-2, {"window": 200, "kv_dtype": "int8"}), ("float32", 1e-4, {})],
    ids=["bfloat16", "int8 in a window", "float32"],
)
def test_the_triton_kernels_agree_with_float64_on_a_fresh_batch_of_llamas_shape(dtype, limit, options):
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
    case = make_case(shape, ((1, 500), (1, 1), (1, 16), (30, 300), (15, 15)), int(fresh_rng().integers(2**31)))
    q, k, v = (x.astype(dtype).astype(jnp.float32) for x in case[:3])
    case = case._replace(q=q, k=k, v=v, history=case.history.astype(jnp.dtype(dtype)).astype(np.float32))
    assert (
        relative_error(run(pallas_triton.INTERPRETED, case, dtype, **options)[0], expected(case, **options)[0]) < limit
    )


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_cache_costs_little_precision(kv_dtype):
    case = make_case(SHAPE, MIXES["decodes and chunks"])
    exact, stored = (run(reference.BACKEND, case, jnp.float32, kv_dtype=x)[0] for x in (None, kv_dtype))
    assert 0 < np.abs(stored - exact).max() < {"int8": 0.02, "float8_e4m3fn": 0.1}[kv_dtype]


def test_native_code_raises_for_what_it_refuses():
    case = make_case(SHAPE, MIXES["decodes"])
    with pytest.raises(NotImplementedError, match="no sliding window, no soft-cap"):
        native.attend(case.q, case.k, case.v, None, case.ragged, scale=1.0, window=3, softcap=1.0)


@pytest.mark.parametrize("backend", [reference.BACKEND, *BACKENDS], **by_name)
def test_a_layer_is_read_and_written_alone(backend):
    case = make_case(SHAPE, MIXES["decodes and chunks"])
    alone, among = run(backend, case, jnp.float32), run(backend, case, jnp.float32, num_layers=3, layer=1)
    np.testing.assert_array_equal(among[0], alone[0])
    np.testing.assert_array_equal(among[1], alone[1])


@pytest.mark.parametrize("tiles", [XlaTiles(1, 8, 1, 8, 1), XlaTiles(3, 24, 5, 40, 2), XlaTiles(64, 512, 64, 512, 9)])
def test_tiles_change_nothing(tiles):
    case = make_case(SHAPE, MIXES["decodes and chunks"])
    np.testing.assert_allclose(run(xla.BACKEND, case, jnp.float32, tiles=tiles)[0], expected(case)[0], atol=2e-5)


@pytest.mark.parametrize("backend", [reference.BACKEND, *BACKENDS], **by_name)
def test_padding_tokens_write_nothing_and_give_zero(backend):
    case = make_case(SHAPE, MIXES["decodes"])
    out, stored = run(backend, case, jnp.float32)
    assert not out[case.num_real :].any()
    written = ~np.isnan(stored[0]).all(axis=(-2, -1))
    assert written.sum() == sum(kv_len for _, kv_len in MIXES["decodes"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("mix", ["decodes and chunks", "one long among many short"])
@pytest.mark.parametrize("backend", [reference.BACKEND, *BACKENDS], **by_name)
def test_a_row_that_is_no_number_keeps_it_to_itself(backend, mix, bad):
    case = make_case(SHAPE, MIXES[mix])
    clean = run(backend, case, jnp.float32)[0]
    for name in ("q", "k", "v"):
        broken = case._replace(**{name: getattr(case, name).at[0].set(bad)})
        out = run(backend, broken, jnp.float32)[0]
        assert not np.isfinite(out[0]).any()
        np.testing.assert_array_equal(out[1:], clean[1:])


@pytest.mark.parametrize("backend", BACKENDS, **by_name)
def test_the_cache_is_updated_in_place_under_donation(backend):
    case = make_case(SHAPE, MIXES["decodes"])
    cache = backend.init_cache(NUM_BLOCKS, 16, 2, 16, jnp.float32, num_layers=2)
    step = jax.jit(lambda c, *x: backend.attend(*x, c, case.ragged, scale=1.0, layer=1)[::-1], donate_argnums=0)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    for _ in range(2):
        cache, _ = step(cache, case.q, case.k, case.v)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)] == pointers


@pytest.mark.parametrize(("num_tokens", "num_layers"), [(1, 1), (48, 2)])
def test_temporaries_do_not_grow_with_the_pool(num_tokens, num_layers):
    small, large = (temporary_bytes(num_blocks, num_tokens, num_layers) for num_blocks in (512, 8192))
    assert large == small


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_block_bytes_are_what_a_block_of_one_layer_takes(dtype):
    for backend in (reference.BACKEND, xla.BACKEND, pallas_triton.INTERPRETED, native.BACKEND):
        if dtype != "bfloat16" and backend is native.BACKEND:
            continue
        cache = backend.init_cache(10, 16, 3, 64, dtype, num_layers=4)
        leaves = jax.tree.leaves(cache)
        assert sum(leaf.nbytes for leaf in leaves) == 10 * 4 * backend.block_bytes(16, 3, 64, dtype)
        assert {leaf.shape[0] for leaf in leaves} == {10}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("shape", [*SMALL, *MODELS.values()], ids=str)
def test_the_triton_kernel_lowers_for_cuda(shape):
    def ints(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    def heads(n):
        return jax.ShapeDtypeStruct((32, n, shape.head_dim), jnp.bfloat16)

    cache = jax.eval_shape(lambda: pallas_triton.BACKEND.init_cache(64, *cache_shape(shape), jnp.bfloat16))
    ragged = xla.Ragged(ints(8, 32), ints(9), ints(8), ints(32), ints())
    args = (heads(shape.num_heads), heads(shape.num_kv_heads), heads(shape.num_kv_heads), cache, ragged)
    assert "ragged_attention" in lowered_for_cuda(lambda *x: pallas_triton.attend(*x, scale=1.0), args)


def lowered_for_cuda(function, args):
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def cache_shape(shape):
    return shape.block_size, shape.num_kv_heads, shape.head_dim


def check(backend, case, dtype):
    got, wanted = run(backend, case, dtype), run(reference.BACKEND, case, dtype)
    np.testing.assert_allclose(got[0], wanted[0], atol=TOLERANCE[dtype])
    np.testing.assert_array_equal(got[1], wanted[1])


def temporary_bytes(num_blocks, num_tokens, num_layers):
    case = make_case(SHAPE, MIXES["decodes"] if num_tokens > 2 else ((1, 5),))
    cache = jax.eval_shape(lambda: xla.init_cache(num_blocks, 16, 2, 16, jnp.bfloat16, num_layers))
    q, k, v = (x[:num_tokens].astype(jnp.bfloat16) for x in (case.q, case.k, case.v))
    ragged = case.ragged._replace(slots=case.ragged.slots[:num_tokens])
    step = jax.jit(lambda c, *x: xla.attend(*x, c, ragged, scale=1.0, layer=num_layers - 1)[::-1], donate_argnums=0)
    assert isinstance(cache, KVBlocks) and num_tokens <= TOKENS
    return step.lower(cache, q, k, v).compile().memory_analysis().temp_size_in_bytes
