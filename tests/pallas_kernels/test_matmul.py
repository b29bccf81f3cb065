from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import FloatWeight, Layout, matmul, register, take_rows

RNG = np.random.default_rng(0)


@partial(jax.tree_util.register_dataclass, data_fields=["w", "factor"], meta_fields=[])
@dataclass(frozen=True)
class ScaledWeight:
    w: jax.Array
    factor: jax.Array


def weight(dtype=jnp.float32):
    return FloatWeight(jnp.asarray(RNG.standard_normal((24, 16)), dtype))


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_products_are_summed_in_float32(num_tokens, dtype):
    x, w = jnp.asarray(RNG.standard_normal((num_tokens, 16)), dtype), weight(dtype)
    out = matmul(x, w, jnp.float32)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, np.asarray(x, np.float64) @ np.asarray(w.w, np.float64).T, atol=2e-5)


def test_the_output_has_the_input_dtype_unless_told():
    x = jnp.ones((3, 16), jnp.bfloat16)
    assert matmul(x, weight(jnp.bfloat16)).dtype == jnp.bfloat16


def test_rows_are_taken_as_they_are():
    w = weight(jnp.bfloat16)
    np.testing.assert_array_equal(take_rows(w, jnp.array([3, 0, 3])), w.w[np.array([3, 0, 3])])


def test_a_new_layout_slots_in_by_registration():
    layout = Layout(
        lambda x, w: matmul(x, FloatWeight(w.w), jnp.float32) * w.factor, lambda w, ids: w.w[ids] * w.factor
    )
    register(ScaledWeight, layout)
    x, w = jnp.ones((2, 16)), weight().w
    np.testing.assert_allclose(jax.jit(matmul)(x, ScaledWeight(w, jnp.float32(2))), 2 * (x @ w.T), rtol=1e-5)
    with pytest.raises(ValueError, match="registered already"):
        register(ScaledWeight, layout)


def test_a_weight_of_no_layout_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="ndarray; known: FloatWeight"):
        matmul(jnp.ones((1, 4)), np.ones((4, 4)))
