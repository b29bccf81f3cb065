"""The comparison with peers: its workloads are what it says, its medians and ratios are right."""

import importlib.util
from pathlib import Path

import pytest

from pagedjax.bench.metrics import Chunk, RequestRecord, Status
from pagedjax.core.errors import ConfigError

PATH = Path(__file__).parents[2] / "benchmarks" / "peers.py"


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("peers", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_row(engine, rate, ttft_ms, round_index=0, **fields):
    summary = {"mean": ttft_ms, "p50": ttft_ms, "p90": ttft_ms, "p99": ttft_ms, "max": ttft_ms}
    figures = {
        "output_tokens_per_s": rate,
        "requests_per_s": rate / 100,
        "num_failed": 0,
        "ttft_ms": summary,
        "itl_ms": None,
        "tpot_ms": summary,
        "e2e_ms": summary,
    }
    row = {"engine": engine, "workload": "W1", "round": round_index, "figures": figures}
    return row | {"peak_memory_bytes": 1 << 20, "other_cpu_s": None} | fields


@pytest.mark.parametrize(
    ("name", "num", "prompt_lens", "output_lens", "concurrency"),
    [
        ("W1", 8, (128, 128), (128, 128), 1),
        ("W2", 64, (32, 512), (128, 128), None),
        ("W2@16", 16, (32, 512), (128, 128), None),
        ("W4", 64, (544, 544), (64, 64), None),
    ],
)
def test_bursts_have_the_stated_shape(peers, name, num, prompt_lens, output_lens, concurrency):
    workload = peers.make_workload(name, seed=0)
    assert len(workload.requests) == num
    assert workload.max_concurrency == concurrency
    assert all(request.due_s == 0.0 for request in workload.requests)
    assert all(prompt_lens[0] <= request.prompt_len <= prompt_lens[1] for request in workload.requests)
    assert all(output_lens[0] <= request.max_tokens <= output_lens[1] for request in workload.requests)


def test_the_fourth_workload_shares_its_prefix(peers):
    words = [request.prompt.split() for request in peers.make_workload("W4", seed=0).requests]
    assert len({tuple(prompt[:512]) for prompt in words}) == 1
    assert len({tuple(prompt[512:]) for prompt in words}) == 64


def test_the_third_workload_lasts_a_minute_at_its_rate(peers):
    due_s = [request.due_s for request in peers.make_workload("W3@4", seed=0).requests]
    assert due_s == sorted(due_s)
    assert 50 < due_s[-1] <= 60
    assert 200 < len(due_s) < 280


def record(due_s, ttft_s, total_s, status=Status.OK):
    chunks = (Chunk(due_s + ttft_s, 1),)
    return RequestRecord(due_s, due_s, due_s + total_s, chunks, prompt_len=1, output_len=1, status=status)


def test_what_keeps_up_is_sustained(peers):
    kept = peers.sustained([record(i / 2, 0.1, 1.0) for i in range(120)])
    assert kept == {"ended_of_due": 1.0, "ttft_growth": pytest.approx(1.0), "holds": True}


@pytest.mark.parametrize(
    "records",
    [
        [record(i / 2, 0.1 + i / 300, 1.0) for i in range(120)],  # a line that grows
        [record(i / 2, 0.1, 1 + max(0, i - 60) / 4) for i in range(120)],  # ends that lag behind
        [record(i / 2, 0.1, 1, Status.OK if i % 10 else Status.FAILED) for i in range(120)],
        [record(0, 0.1, 1, Status.FAILED)],
    ],
)
def test_what_falls_behind_or_fails_is_not(peers, records):
    assert not peers.sustained(records)["holds"]


def test_rounds_have_prompts_of_their_own(peers):
    first, second = (peers.make_workload("W4", seed=seed).requests[0].prompt for seed in (0, 1))
    assert first[:50] != second[:50]


@pytest.mark.parametrize("name", ["W5", "", "W2@many"])
def test_unknown_workloads_are_refused(peers, name):
    with pytest.raises((ConfigError, ValueError)):
        peers.make_workload(name, seed=0)


def test_medians_are_taken_over_rounds(peers):
    rows = [make_row("a", rate, ttft, index) for index, (rate, ttft) in enumerate([(90, 5.0), (100, 7.0), (300, 6.0)])]
    values = peers.medians(rows)["W1"]["a"]
    assert (values["out tok/s"], values["TTFT p50"], values["ITL p50"]) == (100, 6.0, None)
    assert (values["memory MiB"], values["other CPU s"], values["failed"]) == (1.0, None, 0.0)


def test_ratios_above_one_are_better_for_rates_and_latencies(peers):
    summary = peers.medians([make_row("a", 200, 5.0), make_row("b", 100, 20.0)])
    against_b = peers.ratios(summary, "b")["W1"]
    assert against_b["a"]["out tok/s"] == pytest.approx(2.0)
    assert against_b["a"]["TTFT p50"] == pytest.approx(4.0)
    assert against_b["b"]["out tok/s"] == pytest.approx(1.0)
    assert "ITL p50" not in against_b["a"]
    assert peers.render(summary, "b").splitlines()[1].split()[-1] == "2.00"


def test_token_times_of_an_offline_engine_become_a_record(peers):
    record = peers.offline_record(
        {"due_s": 1.0, "start_s": 1.0, "token_times_s": [1.5, 1.75, 2.0], "prompt_len": 7, "error": None}
    )
    assert (record.ttft_s, record.tpot_s, record.e2e_s) == (0.5, 0.25, 1.0)
    assert (record.prompt_len, record.output_len) == (7, 3)


def test_an_offline_request_without_tokens_is_a_failure(peers):
    entry = {"due_s": 1.0, "start_s": 1.0, "token_times_s": [], "prompt_len": 7, "error": "no tokens"}
    assert (peers.offline_record(entry).status, peers.offline_record(entry).error) == ("failed", "no tokens")
