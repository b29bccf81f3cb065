"""Native products against float64, for every format, level of instructions and edge of a tile.

x is rounded to bfloat16 beforehand, so that bf16 products are exact up to float32's sums. Quantised inputs are wrong by
half a step at most, which bounds the result without saying how it is summed.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import native
from pallas_kernels.matmul import (
    FloatWeight,
    Norm,
    fused_argmax,
    join,
    linear,
    matmul,
    pack_floats,
    pack_quantised,
    packing,
    take_rows,
)

FORMATS = ("bf16", "nibbles", "bytes")
ROWS = (1, 2, 3, 7, 8, 17, 64)
SHAPES = ((48, 32), (100, 576), (224, 96))  # (out, in)
pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"no native kernels: {native.unavailable()}")


def make(kind: str, num_out: int, num_in: int, seed: int = 0):
    """A packed weight and its values [out, in], float64."""
    floats = np.random.default_rng(seed).standard_normal((num_out, num_in)).astype(np.float32)
    if kind == "bf16":
        return pack_floats(floats), floats.astype(ml_dtypes.bfloat16).astype(np.float64)
    rows = (packing.quantise_nibbles if kind == "nibbles" else packing.quantise_bytes)(floats)
    return pack_quantised([rows]), packing.dequantise(rows).astype(np.float64)


def make_x(rows: int, num_in: int, seed: int = 1) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((rows, num_in)).astype(ml_dtypes.bfloat16)
    return x.astype(np.float32)


def bound(kind: str, x: np.ndarray, values: np.ndarray, fine: bool = False) -> np.ndarray:
    """How far a product may be from the true one, [rows, out]."""
    sums = 3e-6 * np.abs(x) @ np.abs(values).T
    if kind == "bf16":
        return sums
    groups = x.reshape(len(x), -1, 32)
    peaks = np.abs(groups).max(-1, keepdims=True)
    stands_out = fine & (peaks > 4.001 * peaks.mean(1, keepdims=True))
    half_step = peaks / np.where(stands_out, 127 * 254, 127) / 2 * 1.001
    return sums + np.broadcast_to(half_step, groups.shape).reshape(x.shape) @ np.abs(values).T


def check(out, expected, allowed) -> None:
    assert np.all(np.abs(np.asarray(out, np.float64) - expected) <= allowed)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_products_at_every_edge_of_a_tile(level, kind, num_rows):
    for num_out, num_in in SHAPES:
        weight, values = make(kind, num_out, num_in)
        x = make_x(num_rows, num_in)
        check(jax.jit(matmul)(x, weight), x @ values.T, bound(kind, x, values))


@pytest.mark.parametrize("kind", ["nibbles", "bytes"])
@pytest.mark.parametrize("num_rows", [1, 5, 100])
def test_fine_inputs_keep_small_values_beside_outliers(level, kind, num_rows):
    weight, values = make(kind, 96, 320)
    x = make_x(num_rows, 320)
    x[::2, 40] = 500
    x[-1, 319] = -450
    expected, allowed = x @ values.T, bound(kind, x, values, fine=True)
    fine = np.asarray(jax.jit(partial(linear, fine_input=True))(x, weight), np.float64)
    check(fine, expected, allowed)
    coarse = np.asarray(jax.jit(linear)(x, weight), np.float64)
    assert np.abs(coarse[-1] - expected[-1]).max() > 8 * np.abs(fine[-1] - expected[-1]).max()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_call_does_norm_bias_swiglu_and_residual(level, kind, num_rows, dtype):
    weight, values = make(kind, 192, 96)
    x = make_x(num_rows, 96) * 3
    rng = np.random.default_rng(2)
    scales, bias, residual = (rng.standard_normal(n).astype(np.float32) for n in (96, 192, (num_rows, 96)))
    residual = residual.astype(dtype)
    fused = partial(linear, norm=Norm(scales, 1e-5), gated=True, fine_input=True, out_dtype=dtype)
    out = jax.jit(fused)(jnp.asarray(x, dtype), weight, bias=bias, residual=residual)
    normed = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-5) * scales
    gate, up = np.split(normed @ values.T + bias, 2, axis=-1)
    expected = residual.astype(np.float64) + gate / (1 + np.exp(-gate)) * up
    assert out.dtype == dtype
    assert np.max(np.abs(np.asarray(out, np.float64) - expected)) <= 2e-2 * np.max(np.abs(expected))


def test_fused_equals_composed_for_a_weight_of_floats():
    """The definition that the native kernels follow, on XLA alone."""
    rng = np.random.default_rng(3)
    w, x, scales, bias, residual = (rng.standard_normal(n).astype(np.float32) for n in ((12, 8), (5, 8), 8, 12, (5, 6)))
    out = linear(x, FloatWeight(w), norm=Norm(scales, 1e-5), bias=bias, gated=True, residual=residual)
    normed = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * scales
    gate, up = np.split(normed @ w.T + bias, 2, axis=-1)
    np.testing.assert_allclose(out, residual + gate / (1 + np.exp(-gate)) * up, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_any_float_goes_in_and_the_dtype_asked_for_comes_out(level, dtype):
    weight, values = make("bf16", 48, 32)
    x = make_x(3, 32)
    out = jax.jit(linear)(jnp.asarray(x, dtype), weight)
    assert out.dtype == dtype
    check(out, x @ values.T, 1e-2 * np.abs(x) @ np.abs(values).T)


@pytest.mark.parametrize("num_out", [100, 104])
def test_a_gated_weight_whose_halves_are_no_whole_blocks_still_works(level, num_out):
    weight, values = make("bf16", num_out, 64)
    x = make_x(3, 64)
    gate, up = np.split(x @ values.T, 2, axis=-1)
    out = jax.jit(partial(linear, gated=True))(x, weight)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(level, kind, value):
    weight, values = make(kind, 64, 64)
    x = make_x(9, 64)
    x[4, 37] = value
    out = np.asarray(jax.jit(matmul)(x, weight))
    assert not np.isfinite(out[4]).any()
    sound = [row for row in range(9) if row != 4]
    check(out[sound], x[sound] @ values.T, bound(kind, x[sound], values))


@pytest.mark.parametrize("kind", FORMATS)
def test_zero_rows_give_zero(level, kind):
    weight, _ = make(kind, 48, 32)
    assert not np.asarray(jax.jit(matmul)(np.zeros((2, 32), np.float32), weight)).any()


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_taken_from_a_packed_weight_are_its_values(level, kind):
    weight, values = make(kind, 100, 96)
    ids = np.array([0, 99, 15, 16, 42, 42])
    np.testing.assert_array_equal(jax.jit(take_rows)(weight, ids), values[ids].astype(np.float32))


def argmax(x, weight):
    return map(np.asarray, jax.jit(fused_argmax(weight))(x, weight))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_argmax_is_that_of_the_product(level, kind, num_rows):
    for num_out, num_in in ((1, 32), *SHAPES, (1500, 64)):
        weight, _ = make(kind, num_out, num_in)
        x = make_x(num_rows, num_in)
        product = np.asarray(jax.jit(partial(matmul, out_dtype=jnp.float32))(x, weight))
        outputs, values = argmax(x, weight)
        np.testing.assert_array_equal(outputs, product.argmax(-1))
        np.testing.assert_array_equal(values, product.max(-1))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("equals", [(3, 4), (17, 35), (0, 901, 1499)])
def test_of_equal_outputs_argmax_is_the_lowest(level, kind, equals):
    floats = np.full((1500, 32), -0.5, np.float32)
    floats[list(equals)] = 1
    rows = {"nibbles": packing.quantise_nibbles, "bytes": packing.quantise_bytes}
    weight = pack_floats(floats) if kind == "bf16" else pack_quantised([rows[kind](floats)])
    outputs, _ = argmax(np.ones((9, 32), np.float32), weight)
    assert outputs.tolist() == [equals[0]] * 9


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_argmax_of_what_is_not_finite_has_no_finite_value(level, kind, value):
    weight, _ = make(kind, 1500, 64)
    x = make_x(9, 64)
    x[4, 37] = value
    _, found = argmax(x, weight)
    assert not np.isfinite(found[4])
    assert np.isfinite(np.delete(found, 4)).all()


def test_no_output_past_the_last_is_ever_the_largest(level):
    """Those that fill the last block are zeros."""
    outputs, values = argmax(np.ones((3, 32), np.float32), pack_floats(np.full((37, 32), -1, np.float32)))
    assert outputs.tolist() == [0] * 3
    assert values.tolist() == [-32] * 3


@pytest.mark.parametrize("num_rows", [1, 40])
def test_concurrent_callers_get_their_own_results(num_rows):
    weight, values = make("nibbles", 640, 576)
    run = jax.jit(matmul)
    inputs = [make_x(num_rows, 576, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda x: np.asarray(run(x, weight)), inputs * 20))
    for i, x in enumerate(inputs):
        check(outs[i], x @ values.T, bound("nibbles", x, values))
        assert all(np.array_equal(out, outs[i]) for out in outs[i :: len(inputs)])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(FORMATS),
    num_rows=st.integers(1, 40),
    num_out=st.integers(1, 150),
    groups=st.integers(1, 5),
    odd=st.integers(0, 31),
)
def test_any_shape(kind, num_rows, num_out, groups, odd):
    num_in = 32 * groups + (odd if kind == "bf16" else 0)
    weight, values = make(kind, num_out, num_in)
    x = make_x(num_rows, num_in)
    check(jax.jit(matmul)(x, weight), x @ values.T, bound(kind, x, values))


@pytest.mark.parametrize("num_rows", [1, 9])
def test_joined_weights_share_an_array_and_give_the_same(level, num_rows):
    alone = {kind: make(kind, num_out, 96)[0] for kind, num_out in zip(FORMATS, (33, 640, 100))}
    joined = join(dict(alone))
    assert len({id(weight.data) for weight in joined.values()}) == 1
    x, ids = make_x(num_rows, 96), np.arange(33)
    for kind, weight in alone.items():
        for function in (lambda w: matmul(x, w), lambda w: fused_argmax(w)(x, w), lambda w: take_rows(w, ids)):
            jax.tree.map(np.testing.assert_array_equal, function(joined[kind]), function(weight))
    assert join(dict(joined)) == joined


def test_joining_takes_the_weights_one_by_one():
    weights = {kind: make(kind, 48, 32)[0] for kind in FORMATS}
    join(weights)
    assert weights == {}


def test_joined_weights_are_not_joined_with_others():
    joined = join({kind: make(kind, 48, 32)[0] for kind in FORMATS})
    with pytest.raises(ValueError, match="joined already"):
        join({**joined, "other": make("bytes", 48, 32)[0]})


@pytest.mark.parametrize("offset", [-64, 64])
def test_a_weight_that_ends_outside_its_array_is_refused(offset):
    weight = replace(make("nibbles", 48, 32)[0], offset=offset)
    with pytest.raises(Exception, match="another size"):
        jax.block_until_ready(matmul(make_x(1, 32), weight))
