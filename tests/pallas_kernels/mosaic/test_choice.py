"""Where the Mosaic GPU kernels are chosen, and why not elsewhere."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.mosaic import support
from pallas_kernels.ragged_attention import AttentionShape, AttentionVariant

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
needs_api = pytest.mark.skipif(support.api_gap() is not None, reason=str(support.api_gap()))


def choose(shape=SHAPE, dtype=jnp.bfloat16, capability=(9, 0), **options):
    return dispatch.choose(
        "ragged_attention", platform="gpu", shape=shape, dtype=dtype, capability=capability, **options
    )


@needs_api
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_hopper_gets_the_mosaic_kernels(head_dim, block_size):
    choice = choose(SHAPE._replace(head_dim=head_dim, block_size=block_size))
    assert choice.backend.name == "pallas_mosaic"
    assert choice.refused["pallas_triton"] == "pallas_mosaic is preferred"


@needs_api
def test_windows_soft_caps_and_sinks_are_taken():
    variant = AttentionVariant(window=True, softcap=True, sinks=True)
    assert choose(variant=variant).backend.name == "pallas_mosaic"


@pytest.mark.parametrize(
    ("capability", "reason"), [((8, 0), "this GPU has 8.0"), ((10, 0), "has 10.0"), (None, "is unknown")]
)
def test_other_gpus_are_refused(capability, reason):
    choice = choose(capability=capability)
    assert choice.backend.name != "pallas_mosaic"
    assert reason in choice.refused["pallas_mosaic"]


@needs_api
@pytest.mark.parametrize(
    ("change", "dtype", "variant", "reason"),
    [
        ({"head_dim": 80}, "bfloat16", {}, "head_dim 80 is not a multiple of 64"),
        ({"head_dim": 192}, "bfloat16", {}, "head_dim 192 is not one of"),
        ({"block_size": 128}, "bfloat16", {}, "block_size 128"),
        ({"num_heads": 192}, "bfloat16", {}, "24 heads share"),
        ({}, "float32", {}, "dtype float32"),
        ({}, "bfloat16", {"kv_dtype": "int8"}, "no cache in int8"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(change, dtype, variant, reason):
    choice = choose(SHAPE._replace(**change), dtype, variant=AttentionVariant(**variant))
    assert choice.backend.name != "pallas_mosaic"
    assert reason in choice.refused["pallas_mosaic"]


@pytest.mark.parametrize("head_dim", [80, 96, 100, 128])
@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
def test_triton_takes_what_mosaic_refuses_on_hopper(head_dim, kv_dtype):
    choice = choose(SHAPE._replace(head_dim=head_dim), variant=AttentionVariant(kv_dtype=kv_dtype))
    is_refused = head_dim % 64 or kv_dtype is not None
    assert choice.backend.name == ("pallas_triton" if is_refused or support.api_gap() else "pallas_mosaic")


def test_another_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "JAX 0.10.2" in choose().refused["pallas_mosaic"]
    assert "JAX 0.10.2" in choose(capability=(9, 0)).refused["pallas_mosaic_interpret"]


def test_an_old_jax_is_refused_as_it_is():
    assert (support.api_gap() is None) == (jax.__version_info__ >= (0, 11))
