import pytest

from pallas_kernels.jax_triton_guard import refusal


def installed(ours, triton, jax):
    return {"jax-triton": ours, "triton": triton, "jax": jax}


@pytest.mark.parametrize("jax", ["0.10.2", "0.11.2"])
def test_versions_that_were_tried_are_taken(jax):
    assert refusal(installed("0.3.1", "3.6.0", jax)) is None


@pytest.mark.parametrize(
    "versions", [("0.4.1", "3.6.0", "0.11.2"), ("0.3.1", "3.6.0", "0.12.0.1"), ("0.3.1", "3.9.0", "0.11.2")]
)
def test_others_are_refused_with_their_numbers_and_those_that_work(versions):
    reason = refusal(installed(*versions))
    assert all(number in reason for number in versions)
    assert "jax-triton 0.3.1, triton 3.6" in reason
