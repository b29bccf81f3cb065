"""Sampling parameters: what is out of range is the caller's fault, by the field's name."""

import pytest

from pagedjax.core.errors import RequestError
from pagedjax.core.request import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, SamplingParams

HUGE = 10**400  # an integer that no float holds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", value) for value in (0, 129, HUGE, 1.0, True, "2", None)],
        *[("best_of", value) for value in (0, 129, 1.5, True)],
        *[("temperature", value) for value in (-0.1, 2.1, float("nan"), float("inf"), HUGE, "hot", None, True)],
        *[("top_p", value) for value in (0.0, 1.1, HUGE)],
        *[("top_k", value) for value in (-2, 0.5)],
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("seed", value) for value in (2**64, -(2**63) - 1, 0.5)],
        *[("repetition_penalty", value) for value in (0.0, 10.1)],
        *[("presence_penalty", value) for value in (-2.1, 2.1)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1)],
        *[("max_tokens", value) for value in (0, -1, 1.5)],
        *[("min_tokens", value) for value in (-1, 17)],
        *[("logprobs", value) for value in (-1, 21, True)],
        *[("prompt_logprobs", value) for value in (-1, 21)],
        *[("stop", value) for value in (5, "", [""], ["x" * 257], ["x"] * (MAX_STOP_STRINGS + 1), [5], {"a": 1})],
        *[("stop_token_ids", value) for value in (5, "12", [-1], [1.0], [True], {"a": 1})],
        *[("logit_bias", value) for value in (3, [1], {-1: 0}, {1: 101}, {1: HUGE}, {1: "x"}, {"1": 0})],
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0)),
        *[(name, 1) for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")],
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.param == name


def test_lists_in_any_form_become_tuples():
    params = SamplingParams(stop=None, stop_token_ids={7})
    assert (params.stop, params.stop_token_ids) == ((), (7,))
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=iter(["a", "b"])).stop == ("a", "b")
