"""Pieces of decodes, put together by XLA where JAX has no Triton."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import pallas_mosaic
from pallas_kernels.paged_attention.cuts import Cuts

# Three pieces of row 0, none of row 1, one of row 2, then two that nobody wrote.
CUTS = Cuts(*(jnp.array(x) for x in ([0, 0, 0, 2, 2, 2], [0, 64, 128, 0, 9, 9], [64, 128, 130, 9, 9, 9], [0, 3, 3, 4])))
LOG = np.array([3.0, -200.0, 4.5, 1.0, np.nan, np.nan])[:, None] + np.array([0.0, 7.0])


@pytest.fixture
def out():
    values = np.random.default_rng(0).standard_normal((6, 2, 8))
    values[4:] = np.nan
    return values


@pytest.mark.parametrize("sinks", [None, np.array([-1.0, 4.0])], ids=["plain", "sinks"])
def test_pieces_weigh_by_their_logarithms(out, sinks):
    got = combine(out, sinks)
    for head in range(2):
        weights = np.exp2(LOG[:3, head])
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
        np.testing.assert_allclose(got[0, head], weights @ out[:3, head] / total, rtol=1e-5)
    np.testing.assert_array_equal(got[1], 0)


def test_a_row_that_is_nan_leaves_the_others_alone(out):
    out[1, 0, 3] = np.nan
    got = combine(out, None)
    assert np.isnan(got[0]).all()
    np.testing.assert_allclose(got[2], out[3], rtol=1e-5)


def combine(out, sinks):
    parts = jnp.asarray(out, jnp.float32), jnp.asarray(LOG, jnp.float32)
    return np.asarray(pallas_mosaic.combined_by_xla(parts, CUTS, None if sinks is None else jnp.asarray(sinks)))
