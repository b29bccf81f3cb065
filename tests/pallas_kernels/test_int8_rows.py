"""Rows of 8 bits against the numbers they mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import int8_rows, linear, matmul, round_rows, share_scales, take_rows
from pallas_kernels.matmul.int8_rows import Int8Rows

RNG = np.random.default_rng(0)


def make(num_out=24, num_in=96):
    return round_rows(RNG.standard_normal((num_out, num_in)))


def meaning(weight):
    return np.asarray(weight.rows, np.float64) * np.asarray(weight.own_scales, np.float64)[:, None]


def test_rounding_is_wrong_by_half_a_step_of_its_row_at_most():
    values = RNG.standard_normal((24, 96)) * RNG.uniform(0.01, 100, (24, 1))
    values[3] = 0
    wrong = np.abs(meaning(round_rows(values)) - values)
    assert np.all(wrong <= np.abs(values).max(axis=1, keepdims=True) / 254 * 1.0001)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_products_have_inputs_of_16_bits(num_tokens, dtype):
    x, weight = jnp.asarray(RNG.standard_normal((num_tokens, 96)), dtype).at[:, 5].mul(1000), make()
    out = matmul(x, weight, jnp.float32)
    exact = np.asarray(x, np.float64) @ meaning(weight).T
    step = np.abs(np.asarray(x, np.float64)).max(axis=1, keepdims=True) / int8_rows.LARGEST / int8_rows.LOW_STEPS
    reach = 0.5 * step * np.abs(meaning(weight)).sum(axis=1)
    assert out.dtype == jnp.float32
    assert np.all(np.abs(out - exact) <= reach + 1e-5 * np.abs(exact))


def test_a_token_has_the_same_product_in_any_batch_but_for_the_last_bits():
    x, weight = jnp.asarray(RNG.standard_normal((9, 96)), jnp.float32), make()
    for row, together in zip(x, matmul(x, weight)):
        np.testing.assert_allclose(matmul(row[None], weight)[0], together, rtol=1e-6)


def test_what_is_no_number_stays_in_its_token_and_zeros_give_zeros():
    x = jnp.asarray(RNG.standard_normal((4, 96)), jnp.float32).at[1, 7].set(jnp.nan).at[2, 0].set(jnp.inf).at[3].set(0)
    out = np.asarray(matmul(x, make()))
    assert np.isfinite(out[[0, 3]]).all()
    assert not np.isfinite(out[[1, 2]]).any()
    assert not out[3].any()


def test_rows_are_taken_in_float32():
    weight = make()
    rows = take_rows(weight, jnp.array([3, 0, 3]))
    assert rows.dtype == jnp.float32
    np.testing.assert_allclose(rows, meaning(weight)[[3, 0, 3]], rtol=1e-6)


def test_shared_scales_are_one_array_and_mean_the_same():
    weights = {"a": make(24), "b": make(8), "c": make(16)}
    shared = share_scales(weights)
    assert len({id(weight.scales) for weight in shared.values()}) == 1
    for name, weight in weights.items():
        np.testing.assert_array_equal(meaning(shared[name]), meaning(weight))
    x = jnp.ones((2, 96))
    np.testing.assert_array_equal(jax.jit(matmul)(x, shared["b"]), jax.jit(matmul)(x, weights["b"]))
    assert share_scales({}) == {}


def test_what_lies_around_a_product_is_done():
    x, weight = jnp.asarray(RNG.standard_normal((3, 96)), jnp.float32), make(32)
    gate, up = np.split(np.asarray(matmul(x, weight)), 2, axis=1)
    residual = jnp.ones((3, 16))
    np.testing.assert_allclose(linear(x, weight, gated=True, residual=residual), 1 + jax.nn.silu(gate) * up, rtol=1e-6)


def test_sums_that_could_overflow_are_refused():
    largest = int8_rows.MAX_INPUTS
    most = Int8Rows(jnp.full((1, largest), 127, jnp.int8), jnp.ones(1))
    np.testing.assert_allclose(matmul(jnp.ones((1, largest)), most), 127 * largest, rtol=1e-6)
    with pytest.raises(ValueError, match=f"{largest + 1} inputs are more than the {largest}"):
        round_rows(np.ones((1, largest + 1)))
