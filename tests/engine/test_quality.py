"""What keeping a file's own groups costs, on some hundred tokens of the text that the benchmark scores whole."""

import importlib.util
from pathlib import Path

import pytest

from pagedjax.core.request import SamplingParams
from pagedjax.llm import LLM
from pallas_kernels import native

PATH = Path(__file__).parents[2] / "benchmarks" / "quality.py"
# Of perplexity over float32's. On the whole text it is 1 %; so few tokens scatter more.
ALLOWED = (0.97, 1.03)


@pytest.fixture(scope="module")
def quality():
    spec = importlib.util.spec_from_file_location("quality", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def grouped_llm(smollm2_path):
    reason = native.unavailable()
    if reason is not None:
        pytest.skip(reason)
    limits = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 64}
    return LLM(str(smollm2_path), dtype="auto", show_progress_bars=False, **limits)


def test_the_text_has_twenty_thousand_tokens(quality, golden_llm):
    text = quality.TEXT.read_text(encoding="utf-8")
    assert len(golden_llm.get_tokenizer().encode(text, add_special_tokens=False)) > 20_000


def test_a_quantised_files_own_groups_are_as_good_as_float32(quality, golden_llm, grouped_llm):
    text = quality.TEXT.read_text(encoding="utf-8")
    ids = golden_llm.get_tokenizer().encode(text[:4000], add_special_tokens=False)
    cut = [ids[start : start + 256] for start in range(0, 512, 256)]
    exact, scores = (quality.score(llm, cut, continued=0) for llm in (golden_llm, grouped_llm))
    assert len(scores.logprobs) == 2 * 255
    figures = quality.compare(scores, exact)
    assert ALLOWED[0] < figures["perplexity_ratio"] < ALLOWED[1]
    assert figures["argmax_agreement"] > 0.9


def test_greedy_tokens_are_float32s_on_an_easy_prompt(golden_llm, grouped_llm):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (exact,), (ours,) = (llm.generate("1, 2, 3, 4, 5, 6, 7, 8,", greedy) for llm in (golden_llm, grouped_llm))
    assert ours.outputs[0].token_ids == exact.outputs[0].token_ids


def test_perplexity_and_agreement_are_counted_from_the_scores(quality):
    exact = quality.Scores([-1.0, -3.0], [5, 6], [[1, 2, 3], [4]])
    worse = quality.Scores([-2.0, -4.0], [5, 7], [[1, 2, 9], [4]])
    figures = quality.compare(worse, exact)
    assert figures["perplexity"] == pytest.approx(20.0855, abs=1e-4)
    assert figures["perplexity_ratio"] == pytest.approx(2.71828, abs=1e-5)
    assert figures["argmax_agreement"] == 0.5
    assert figures["greedy_tokens"] == 1.5
