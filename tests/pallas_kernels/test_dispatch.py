from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch, native
from pallas_kernels.ragged_attention import AttentionShape, AttentionVariant
from pallas_kernels.ragged_attention.shapes import MODELS

SHAPE = MODELS["smollm2-135m"]


def choose(platform="cpu", shape=SHAPE, dtype=jnp.bfloat16, **options):
    return dispatch.choose("ragged_attention", platform=platform, shape=shape, dtype=dtype, **options)


def test_a_cpu_takes_native_code_where_there_is_some_else_xla_and_says_why():
    choice, reason = choose(), native.unavailable()
    assert choice.backend.name == ("native" if reason is None else "xla")
    assert reason is None or choice.refused["native"] == reason
    assert "GPUs only" in choice.refused["pallas_triton"]


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        ({"head_dim": 512}, jnp.bfloat16, "head_dim 512"),
        ({"block_size": 12}, jnp.bfloat16, "block_size 12"),
        ({"block_size": 128}, jnp.bfloat16, "block_size 128"),
        ({}, jnp.int8, "dtype int8"),
    ],
)
def test_native_code_refuses_shapes_it_cannot_take_and_xla_takes_over(change, dtype, reason):
    choice = choose("cpu", SHAPE._replace(**change), dtype)
    assert choice.backend.name == "xla"
    assert reason in choice.refused["native"]


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (AttentionVariant(window=True), "no sliding window"),
        (AttentionVariant(softcap=True, sinks=True), "no soft-cap, no attention sinks"),
        (AttentionVariant(kv_dtype="float8_e4m3fn"), "no cache in float8_e4m3fn"),
    ],
)
def test_native_code_refuses_variants_it_lacks_and_xla_takes_over(variant, reason):
    choice = choose(variant=variant)
    assert choice.backend.name == "xla"
    assert reason in choice.refused["native"]


def test_a_cache_cannot_be_quantised_to_any_type():
    with pytest.raises(ValueError, match="'int3', only to int8 or float8_e4m3fn"):
        AttentionVariant(kv_dtype="int3")


def test_the_compute_capability_is_the_devices():
    assert dispatch.capability_of(SimpleNamespace(compute_capability="9.0")) == (9, 0)
    assert dispatch.capability_of(SimpleNamespace(compute_capability="gfx942")) is None
    assert dispatch.capability_of(SimpleNamespace()) is None


def test_a_gpu_prefers_triton_and_says_so_of_xla():
    choice = choose("gpu")
    assert choice.backend.name == "pallas_triton"
    assert choice.refused["xla"] == "pallas_triton is preferred"


def test_a_gpu_before_ampere_gets_no_triton():
    choice = choose("gpu", capability=(7, 5))
    assert choice.backend.name == "xla"
    assert "needs compute capability 8.0, and this GPU has 7.5" in choice.refused["pallas_triton"]


def test_every_backend_is_chosen_or_refused_with_a_reason():
    for wish in (None, "reference"):
        choice = choose(wish=wish)
        assert {choice.backend.name, *choice.refused} == set(dispatch.names("ragged_attention"))
        assert all(choice.refused.values())


@pytest.mark.parametrize("wish", ["xla", "reference", "pallas_triton_interpret"])
def test_a_wish_is_granted(wish):
    assert choose(wish=wish).backend.name == wish


def test_a_wish_that_cannot_run_is_refused_with_its_reason():
    with pytest.raises(NotImplementedError, match="GPUs only, and this platform is cpu"):
        choose(wish="pallas_triton")


def test_an_unknown_wish_names_the_known_ones():
    with pytest.raises(ValueError, match="no backend 'flash'; it has pallas_mosaic, pallas_triton, native, xla"):
        choose(wish="flash")


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        ({"head_dim": 512}, jnp.bfloat16, "head_dim 512"),
        ({"block_size": 12}, jnp.bfloat16, "block_size 12"),
        ({"block_size": 128}, jnp.bfloat16, "block_size 128"),
        ({"num_heads": 192, "num_kv_heads": 1}, jnp.bfloat16, "192 heads share"),
        ({}, jnp.int8, "dtype int8"),
    ],
)
def test_triton_refuses_shapes_it_cannot_take_and_xla_takes_over(change, dtype, reason):
    choice = choose("gpu", SHAPE._replace(**change), dtype)
    assert choice.backend.name == "xla"
    assert reason in choice.refused["pallas_triton"]


def test_shapes_of_no_model_are_refused():
    with pytest.raises(ValueError, match="do not divide"):
        choose(shape=AttentionShape(num_heads=5, num_kv_heads=2, head_dim=64, block_size=16))
    with pytest.raises(ValueError, match="positive"):
        choose(shape=SHAPE._replace(head_dim=0))
