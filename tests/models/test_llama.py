"""Logits against an independent forward pass in numpy, however the tokens are batched; and what loading refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.core.errors import ConfigError
from pagedjax.models import registry, stack
from pallas_kernels.native import unavailable
from pallas_kernels.ragged_attention import native, pallas_triton, reference, xla
from tests.models.tiny import (
    BIASED,
    BLOCK_SIZE,
    NUM_BLOCKS,
    TIED,
    UNTIED,
    Stepper,
    load,
    make_tensors,
    numpy_logits,
)

LONG, SHORT = (np.random.default_rng(1).integers(0, 97, n) for n in (30, 11))
needs_native = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
NATIVE = [pytest.param(native.BACKEND, unrolled, marks=needs_native) for unrolled in (False, True)]
WHOLE = [[(0, 0, 30)]]
CHUNKED = [[(0, 0, 7)], [(0, 7, 1)], [(0, 8, 20)], [(0, 28, 1)], [(0, 29, 1)]]
BATCHED = [[(1, 0, 5), (0, 0, 7)], [(1, 5, 1), (0, 7, 22)], [(0, 29, 1), (1, 6, 5)]]
ONE_BY_ONE = [[(1, i, 1), (0, i, 1)] for i in range(11)]


def make_stepper(config, backend=xla.BACKEND, dtype="float32", unrolled=False):
    model = load(config, make_tensors(config), dtype, backend)
    shape = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "dtype": dtype}
    caches = stack.init_caches(config, backend, **shape)
    if unrolled:
        one = (NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
        caches = tuple(backend.init_cache(*one) for _ in range(config.num_layers))
    return Stepper(model, caches, [LONG, SHORT])


def check(stepper, config, steps, atol=2e-4):
    wanted = [numpy_logits(config, make_tensors(config), ids) for ids in (LONG, SHORT)]
    for rows in steps:
        for (sequence, start, length), logits in zip(rows, stepper.step(rows)):
            np.testing.assert_allclose(logits, wanted[sequence][start : start + length], atol=atol)


@pytest.mark.parametrize("config", [UNTIED, TIED, BIASED], ids=["untied", "tied, scaled", "biased"])
def test_logits_agree_with_numpy_whole_and_chunked(config):
    stepper = make_stepper(config)
    check(stepper, config, WHOLE)
    check(stepper, config, CHUNKED)


@pytest.mark.parametrize("steps", [BATCHED, ONE_BY_ONE], ids=["chunks beside decodes", "decodes only"])
def test_logits_do_not_depend_on_the_batch(steps):
    check(make_stepper(UNTIED), UNTIED, steps)


@pytest.mark.parametrize(
    ("backend", "unrolled"),
    [(xla.BACKEND, True), (reference.BACKEND, False), (pallas_triton.INTERPRETED, False), *NATIVE],
    ids=lambda x: getattr(x, "name", None),
)
def test_every_backend_and_both_ways_through_the_layers_agree(backend, unrolled):
    check(make_stepper(UNTIED, backend, unrolled=unrolled), UNTIED, BATCHED)


def test_a_loop_takes_one_cache_and_unrolling_one_a_layer_unless_the_backend_joins_them():
    assert len(make_stepper(UNTIED).caches) == 1
    assert len(make_stepper(UNTIED, native.BACKEND).caches) == 1
    assert len(make_stepper(UNTIED, reference.BACKEND).caches) == UNTIED.num_layers
    stepper = make_stepper(UNTIED, reference.BACKEND)
    stepper.caches = stepper.caches[:2]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        stepper.step(WHOLE[0])


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_half_precision_stays_near(dtype, atol):
    stepper = make_stepper(UNTIED, dtype=dtype)
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(stepper.caches)} == {2}
    check(stepper, UNTIED, BATCHED, atol=atol)


def test_logits_are_float32_and_norms_too():
    model = load(UNTIED, make_tensors(UNTIED), "bfloat16")
    assert model.logits(jnp.zeros((1, 48), jnp.bfloat16)).dtype == jnp.float32
    assert model.norm.weight[...].dtype == jnp.float32


def test_each_tensor_is_asked_for_once():
    tensors, asked = make_tensors(UNTIED), []
    model = registry.find(UNTIED).load(
        UNTIED,
        lambda name: asked.append(name) or tensors[name],
        tensors.keys(),
        dtype="float32",
        backend=xla.BACKEND,
    )
    assert sorted(asked) == sorted(tensors)
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == sum(t.size for t in tensors.values())


def test_a_loaded_model_does_not_share_memory_with_the_file():
    tensors = make_tensors(UNTIED)
    model = load(UNTIED, tensors)
    before = np.array(model.norm.weight[...])
    tensors["model.norm.weight"][:] = 0
    np.testing.assert_array_equal(model.norm.weight[...], before)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_named(name):
    tensors = make_tensors(UNTIED)
    del tensors[name]
    with pytest.raises(ConfigError, match=f"has no {name}"):
        load(UNTIED, tensors)


def test_surplus_tensors_are_named():
    tensors = make_tensors(UNTIED)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(16)
    with pytest.raises(ConfigError, match=r"does not use: model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(UNTIED, tensors)


def test_a_wrong_shape_is_named_with_both_shapes():
    tensors = make_tensors(UNTIED)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((80, 47), np.float32)
    with pytest.raises(ConfigError, match=r"2.mlp.up_proj.weight has shape \(80, 47\), but the config says \(80, 48\)"):
        load(UNTIED, tensors)


def test_rotary_tables_of_old_checkpoints_are_passed_over():
    tensors = make_tensors(UNTIED)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8)
    load(UNTIED, tensors)


def test_a_tied_head_may_be_written_out_but_not_differ():
    tensors = make_tensors(TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    load(TIED, tensors)
    tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(ConfigError, match="their values differ"):
        load(TIED, tensors)
