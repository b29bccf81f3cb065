"""Greedy references of the bundled model, and what it means to agree with them."""

import json
from pathlib import Path
from typing import Any

from pagedjax.core.request import RequestOutput

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "golden" / "smollm2_135m_q4_1_f32.json").read_text()
)
# Below this margin between the best two tokens, float32 sums in another order may choose the other.
NEAR_TIE = 2e-3
TOLERANCE = 2e-3


def num_certain_tokens(case: dict[str, Any]) -> int:
    """How many of the reference's tokens come before its first near tie."""
    return next((i for i, margin in enumerate(case["margins"]) if margin < NEAR_TIE), len(case["margins"]))


def assert_agrees(case: dict[str, Any], output: RequestOutput) -> None:
    """Equal ids up to the reference's first near tie, and the log-probabilities of those ids, where there are any."""
    assert output.prompt_token_ids == case["prompt_ids"]
    completion = output.outputs[0]
    num_certain = num_certain_tokens(case)
    assert completion.token_ids[:num_certain] == case["greedy_ids"][:num_certain]
    for i, entry in enumerate((completion.logprobs or [])[:num_certain]):
        assert abs(entry[completion.token_ids[i]].logprob - case["logprobs"][i]) < TOLERANCE
    if num_certain == len(case["margins"]):
        assert completion.text == case["text"]
        assert completion.finish_reason == ("stop" if case["greedy_ids"][-1] == 2 else "length")
