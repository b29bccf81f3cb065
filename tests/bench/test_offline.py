"""Offline runs, with an engine that notes what it was asked."""

import pytest

from pagedjax.bench.latency import time_batches
from pagedjax.bench.throughput import generate
from pagedjax.bench.workload import BenchRequest


class NotingLLM:
    def generate(self, prompts, params, *, use_tqdm):
        self.prompts, self.params = prompts, params
        return []


def test_offline_requests_are_greedy_and_of_the_asked_length():
    llm = NotingLLM()
    generate(llm, [BenchRequest(0.0, "the of", 2, 5), BenchRequest(0.0, (7, 8), 2, 9)])
    assert llm.prompts == ["the of", [7, 8]]
    assert [(p.max_tokens, p.temperature, p.ignore_eos) for p in llm.params] == [(5, 0.0, True), (9, 0.0, True)]


def test_every_batch_is_timed_once():
    seen = []
    iterations_ms, interrupted = time_batches(seen.append, [("a",), ("b",)])
    assert seen == [("a",), ("b",)]
    assert len(iterations_ms) == 2
    assert min(iterations_ms) >= 0.0
    assert not interrupted


def test_ctrl_c_keeps_the_batches_that_are_done():
    def stop_at_third(batch):
        if batch == 3:
            raise KeyboardInterrupt

    iterations_ms, interrupted = time_batches(stop_at_third, [1, 2, 3, 4])
    assert (len(iterations_ms), interrupted) == (2, True)


def test_ctrl_c_before_any_batch_leaves_nothing_to_report():
    def stop(_batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_batches(stop, [1])
