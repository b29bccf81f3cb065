"""The report: its JSON has every figure, its table is aligned, and files are written whole."""

import json
import os
import subprocess
import sys

import pytest

from pagedjax import __version__
from pagedjax.bench import machine
from pagedjax.bench.metrics import Chunk, RequestRecord, Status, serve_figures
from pagedjax.bench.report import (
    LatencyFigures,
    Memory,
    ThroughputFigures,
    align,
    check_writable,
    make_report,
    render,
    write_json,
)
from pagedjax.bench.throughput import figures as throughput_figures
from pagedjax.core.errors import ConfigError
from pagedjax.core.request import CompletionOutput, RequestOutput

SUMMARY = {"mean", "p50", "p90", "p99", "max"}


def make_record(**fields) -> RequestRecord:
    defaults = {"due_s": 0.0, "start_s": 0.0, "end_s": 1.0, "prompt_len": 10, "output_len": 2}
    return RequestRecord(**(defaults | {"chunks": (Chunk(0.5, 1), Chunk(0.9, 1))} | fields))


def serve_report():
    records = [make_record(), make_record(status=Status.FAILED, error="HTTP 500: no", chunks=())]
    figures = serve_figures(records, 2.0)
    return make_report(
        "serve",
        figures,
        command=["pagedjax", "bench", "serve", "--extra-body", '{"a": 1}'],
        settings={"model": "tiny"},
        memory=Memory(3 << 20, None),
        records=records,
        interrupted=False,
    )


def test_the_report_says_what_ran_where_and_what_came_out():
    report = serve_report()
    assert report["schema"] == "pagedjax.bench/1"
    assert report["command"] == """pagedjax bench serve --extra-body '{"a": 1}'"""
    assert {"cpu", "num_cpus", "memory_bytes", "system"} == set(report["machine"])
    assert report["versions"]["python"].count(".") == 2
    assert report["versions"]["pagedjax"] == __version__
    assert report["memory"] == {"host_peak_bytes": 3 << 20, "device_peak_bytes": None}
    assert report["interrupted"] is False
    figures = report["figures"]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert set(figures[name]) == SUMMARY
    assert figures["errors"] == [["HTTP 500: no", 1]]
    assert [entry["status"] for entry in report["requests"]] == ["ok", "failed"]
    assert [entry["ttft_ms"] for entry in report["requests"]] == [500.0, None]


def test_the_report_is_plain_json(tmp_path):
    report = serve_report()
    write_json(tmp_path / "r.json", report)
    assert json.loads((tmp_path / "r.json").read_text()) == report
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_the_table_shows_rates_latencies_errors_and_known_memory():
    table = render(serve_report())
    lines = {line.split("  ")[0]: line.split()[-1] for line in table.splitlines() if "  " in line}
    assert lines["requests finished"] == "1"
    assert lines["requests/s"] == "0.50"
    assert lines["peak host memory (MiB)"] == "3"
    assert "error x 1: HTTP 500: no" in table
    assert "device memory" not in table
    assert "goodput" not in table


def test_offline_figures_have_tables_too():
    latency = LatencyFigures(2, 8, 4, 80.0, serve_figures([make_record()], 1.0).e2e_ms, (100.0,))
    throughput = ThroughputFigures(3, 1.5, 30, 12, 0, 2.0, 8.0, 28.0)
    for mode, figures, line in (("latency", latency, "batch size"), ("throughput", throughput, "total tokens/s")):
        report = make_report(mode, figures, command=[], settings={"model": "m"}, memory=Memory(None, 5 << 20))
        assert line in render(report)
        assert "peak device memory (MiB)" in render(report)


def test_throughput_counts_what_the_outputs_hold():
    outputs = [RequestOutput("a", None, [1, 2, 3], [CompletionOutput(0, token_ids=[4, 5])], num_cached_tokens=2)] * 2
    figures = throughput_figures(outputs, wall_s=0.5)
    assert (figures.input_tokens, figures.output_tokens, figures.cached_tokens) == (6, 4, 4)
    assert (figures.requests_per_s, figures.output_tokens_per_s, figures.total_tokens_per_s) == (4.0, 8.0, 20.0)


def test_columns_are_aligned():
    assert align([("a", "1"), ("bbb", "22")]) == "a     1\nbbb  22"


@pytest.mark.parametrize("name", ["", "missing/x.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot write"):
        check_writable(tmp_path / name)


def test_the_commit_is_known_inside_a_checkout_only(tmp_path):
    assert machine.git_commit(tmp_path) is None

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "f").write_text("1")
    assert machine.git_commit(tmp_path) is None
    git("add", "f")
    git("commit", "-m", "one")
    assert machine.git_commit(tmp_path)["dirty"] is False
    (tmp_path / "f").write_text("2")
    found = machine.git_commit(tmp_path)
    assert (len(found["commit"]), found["dirty"]) == (40, True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_tree_counts_its_children():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        try:
            while len(machine.process_tree(parent.pid)) < 2 and parent.poll() is None:
                pass
            tree = machine.process_tree(parent.pid)
            assert tree[0] == parent.pid
            assert machine.peak_memory_bytes(parent.pid) > machine.peak_memory_bytes(tree[1]) > 1 << 20
            assert machine.cpu_seconds(parent.pid) >= 0.0
        finally:
            parent.communicate(b"\n")


def test_a_process_that_is_gone_has_no_memory():
    assert machine.peak_memory_bytes(2**22 + 1) is None
    assert machine.cpu_seconds(2**22 + 1) is None
    assert machine.own_peak_memory_bytes() is None or machine.own_peak_memory_bytes() > 1 << 20
    assert os.getpid() in machine.process_tree(os.getpid()) or not sys.platform.startswith("linux")
