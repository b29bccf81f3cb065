import importlib.util
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quant_matmul
from pallas_kernels.matmul import matmul, take_rows
from pallas_kernels.quant_matmul import QuantNeed, choose, from_awq, from_gptq, pallas_triton, reference, stack, xla
from pallas_kernels.quant_matmul.choice import CANDIDATES
from pallas_kernels.quant_matmul.shapes import SMALL, QuantShape
from pallas_kernels.quant_matmul.tiles import quant_tiles
from tests.pallas_kernels.quant_checkpoints import awq_tensors, gptq_tensors, make_quantised

SHAPE = QuantShape(512, 72, 128)


@pytest.fixture
def rng():
    """Fresh numbers each run; pytest shows what is printed where a test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def make_weight(rng, shape, *, act_order=False):
    """An AWQ weight, or a GPTQ one with act-order, and its values [out, in], float64."""
    made = make_quantised(rng, *shape, act_order=act_order)
    if act_order:
        made = made._replace(zeros=np.maximum(made.zeros, 1))
        tensor = from_gptq(**gptq_tensors(made), zeros_less_one=True)
    else:
        tensor = from_awq(**awq_tensors(made))
    return stack([tensor], platform="cpu"), made.values


def make_x(rng, num_tokens, num_in, dtype="bfloat16"):
    return jnp.asarray(rng.standard_normal((num_tokens, num_in)), dtype)


def error(out, x, values):
    """The largest, relative to the largest result; out [tokens, out] beside float64's product of the same x."""
    exact = np.asarray(x, np.float64) @ values.T
    assert out.shape == exact.shape and out.dtype == jnp.float32
    return np.abs(np.asarray(out, np.float64) - exact).max() / np.abs(exact).max()


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 17, 33])
def test_the_kernel_agrees_with_float64_to_float32s_precision(rng, shape, num_tokens):
    weight, values = make_weight(rng, shape)
    x = make_x(rng, num_tokens, shape.num_in)
    assert error(pallas_triton.multiply(x, weight, interpret=True), x, values) < 1e-5


@pytest.mark.parametrize("dtype", pallas_triton.DTYPES)
def test_the_kernel_takes_gptqs_act_order_and_every_dtype_it_names(rng, dtype):
    weight, values = make_weight(rng, SHAPE, act_order=True)
    x = make_x(rng, 65, SHAPE.num_in, dtype)
    assert error(pallas_triton.multiply(x, weight, interpret=True), x, values) < 1e-5


def test_tokens_that_are_not_there_do_not_spread_nan(rng):
    weight, values = make_weight(rng, SHAPE)
    x = make_x(rng, 5, SHAPE.num_in).at[3].set(jnp.nan)
    out = pallas_triton.multiply(x, weight, interpret=True)
    assert np.isnan(out[3]).all()
    keep = np.array([0, 1, 2, 4])
    assert error(out[keep], x[keep], values) < 1e-5


def test_the_extremes_of_quants_and_zeros_are_exact(rng):
    made = make_quantised(rng, *SHAPE)
    made = made._replace(
        quants=np.where(made.quants < 8, 0, 15), zeros=np.where(made.zeros < 8, 1, 16), groups=made.groups
    )
    weight = stack([from_gptq(**gptq_tensors(made), zeros_less_one=True)], platform="cpu")
    x = make_x(rng, 3, SHAPE.num_in)
    assert error(pallas_triton.multiply(x, weight, interpret=True), x, made.values) < 1e-5


@pytest.mark.parametrize("backend", [xla.BACKEND, reference.BACKEND], ids=lambda backend: backend.name)
@pytest.mark.parametrize("act_order", [False, True])
def test_other_backends_agree_in_float32(rng, backend, act_order):
    weight, values = make_weight(rng, SHAPE, act_order=act_order)
    x = make_x(rng, 4, SHAPE.num_in, "float32")
    assert error(backend.multiply(x, weight), x, values) < 1e-5


def test_dequantising_first_rounds_weights_to_the_activations_type_only(rng):
    weight, values = make_weight(rng, SHAPE)
    x = make_x(rng, 4, SHAPE.num_in)
    assert error(xla.multiply(x, weight), x, values) < 1e-2


def test_matmul_and_take_rows_know_the_layout(rng):
    weight, values = make_weight(rng, SHAPE, act_order=True)
    x = make_x(rng, 2, SHAPE.num_in, "float32")
    assert error(matmul(x, weight), x, values) < 1e-5
    np.testing.assert_allclose(take_rows(weight, jnp.array([5, 0, 71])), values[[5, 0, 71]], rtol=1e-6)


def test_parts_of_one_product_stand_side_by_side(rng):
    made = [make_quantised(rng, 128, num_out, 64) for num_out in (16, 40)]
    weight = stack([from_awq(**awq_tensors(each)) for each in made], platform="cpu")
    x = make_x(rng, 2, 128, "float32")
    assert error(matmul(x, weight), x, np.concatenate([each.values for each in made])) < 1e-5


def test_both_formats_of_gptq_mean_the_same(rng):
    made = make_quantised(rng, *SHAPE)
    made = made._replace(zeros=np.maximum(made.zeros, 1))
    old = from_gptq(**gptq_tensors(made), zeros_less_one=True)
    new = from_gptq(**gptq_tensors(made, less_one=False), zeros_less_one=False)
    assert np.array_equal(old.zeros, new.zeros) and np.array_equal(old.quants, new.quants)


def test_groups_of_unequal_size_are_refused(rng):
    tensors = gptq_tensors(make_quantised(rng, *SHAPE))
    tensors["g_idx"][:] = 0
    with pytest.raises(ValueError, match="does not name 4 groups of 128"):
        from_gptq(**tensors, zeros_less_one=True)


def test_parts_in_another_order_are_refused(rng):
    tensors = [gptq_tensors(make_quantised(rng, *SHAPE, act_order=True)) for _ in range(2)]
    with pytest.raises(ValueError, match="order their inputs differently"):
        stack([from_gptq(**each, zeros_less_one=False) for each in tensors], platform="cpu")


@pytest.mark.parametrize("group_size", [8, 48])
def test_groups_that_no_tile_divides_are_refused(rng, group_size):
    with pytest.raises(ValueError, match="multiple of 32"):
        from_awq(**awq_tensors(make_quantised(rng, 96, 16, group_size)))


def test_shapes_that_do_not_go_together_are_refused(rng):
    tensors = awq_tensors(make_quantised(rng, *SHAPE))
    with pytest.raises(ValueError, match="do not belong"):
        from_awq(tensors["qweight"][:, 1:], tensors["qzeros"], tensors["scales"])


def need(platform="gpu", num_tokens=1, dtype="bfloat16", capability=(9, 0)):
    return QuantNeed(platform, num_tokens, *SHAPE, jnp.dtype(dtype), capability)


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({}, "pallas_triton", None),
        ({"platform": "cpu", "capability": None}, "xla", "GPUs only"),
        ({"num_tokens": 257}, "xla", "257 tokens are more than 256"),
        ({"dtype": "float32"}, "xla", "dtype float32"),
        ({"capability": (7, 5)}, "xla", "compute capability 8.0"),
    ],
)
def test_a_backend_is_chosen_by_device_tokens_and_type_with_reasons(changes, name, reason):
    choice = choose(need(**changes))
    assert choice.backend.name == name
    assert reason is None or reason in choice.refused["pallas_triton"]
    assert {choice.backend.name, *choice.refused} == {candidate.backend.name for candidate in CANDIDATES}


def test_wishes_are_granted_or_refused_by_name():
    assert choose(need(), "reference").backend.name == "reference"
    with pytest.raises(NotImplementedError, match="pallas_triton: Triton compiles for GPUs only"):
        choose(need("cpu"), "pallas_triton")
    with pytest.raises(ValueError, match="no backend 'cuda'; it has pallas_triton"):
        choose(need(), "cuda")


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 256])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_tiles_never_cross_groups_and_splits_share_the_inputs_evenly(shape, num_tokens):
    tiles = quant_tiles(num_tokens, *shape)
    assert shape.group_size % tiles.tile_k == 0
    assert shape.num_in // tiles.tile_k % tiles.splits == 0


MUTANTS = {
    "nibbles swapped": ("((pairs & 15, 0), (pairs >> 4, PAIRED))", "((pairs >> 4, 0), (pairs & 15, PAIRED))"),
    "zeros forgotten": ("(quants - zeros[None])", "quants"),
    "one zero for all groups": ("zeros_ref.at[group, columns]", "zeros_ref.at[group * 0, columns]"),
    "one scale for all groups": ("scales_ref.at[group, columns]", "scales_ref.at[group * 0, columns]"),
    "the last tile of a split lost": ("fori_loop(0, share,", "fori_loop(0, share - 1,"),
    "inputs not paired": ("low_inputs = places // PAIRED * 2 * PAIRED + places % PAIRED", "low_inputs = places"),
    "splits overlap": ("step(split * share + i, sums)", "step(i, sums)"),
    "order ignored": (")(ordered(x, weight),", ")(x,"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_seen(rng, name):
    weight, values = make_weight(rng, QuantShape(1024, 72, 128), act_order=True)
    x = make_x(rng, 4, 1024)
    assert error(mutant(*MUTANTS[name]).multiply(x, weight, interpret=True), x, values) > 1e-2


def mutant(old, new):
    source = inspect.getsource(pallas_triton)
    assert source.count(old) == 1
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("mutant", loader=None))
    exec(source.replace(old, new), module.__dict__)
    return module


def test_the_package_exports_what_it_documents():
    assert all(hasattr(quant_matmul, name) for name in quant_matmul.__all__)
