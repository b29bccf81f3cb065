"""The real model in float32 against references, through every way of batching it."""

import pytest

from pagedjax.core.request import SamplingParams
from pagedjax.llm import LLM
from tests.engine.fakes import num_preemptions
from tests.engine.golden import CASES, TOLERANCE, assert_agrees

GREEDY = SamplingParams(temperature=0, max_tokens=48, logprobs=0)


def prompt_ids():
    return [case["prompt_ids"] for case in CASES]


def test_each_prompt_alone_gives_the_reference(golden_llm):
    for case in CASES[:6]:
        (output,) = golden_llm.generate(case["prompt"], GREEDY)
        assert_agrees(case, output)


def test_chats_give_the_reference(golden_llm):
    chats = [case for case in CASES if "messages" in case]
    for case, output in zip(chats, golden_llm.chat([case["messages"] for case in chats], GREEDY), strict=True):
        assert_agrees(case, output)


def test_a_batch_of_32_mixed_gives_the_reference_for_each(golden_llm):
    for case, output in zip(CASES * 2, golden_llm.generate(prompt_ids() * 2, GREEDY), strict=True):
        assert_agrees(case, output)


def test_the_references_own_ids_get_its_logprobs_at_every_position(golden_llm):
    sequences = [case["prompt_ids"] + case["greedy_ids"] for case in CASES]
    outputs = golden_llm.generate(sequences, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    for case, output in zip(CASES, outputs, strict=True):
        start = len(case["prompt_ids"])
        scores = [output.prompt_logprobs[start + i][token].logprob for i, token in enumerate(case["greedy_ids"])]
        assert max(abs(a - b) for a, b in zip(scores, case["logprobs"], strict=True)) < TOLERANCE


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_chunks_of_32_tokens_and_preemptions_change_nothing(smollm2_path, async_scheduling):
    """The pool holds two sequences to their end, so that others are preempted and computed again."""
    llm = LLM(
        str(smollm2_path),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=12,
        async_scheduling=async_scheduling,
        show_progress_bars=False,
    )
    cases = [case for case in CASES if len(case["prompt_ids"]) <= 64]
    for case, output in zip(cases, llm.generate([case["prompt_ids"] for case in cases], GREEDY), strict=True):
        assert_agrees(case, output)
    assert num_preemptions(llm.engine) > 5
    assert len(llm.engine.state.pool.counts) == 0
