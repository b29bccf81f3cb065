"""The command line: help, refusals, and whole runs of `serve` against a server in the test."""

import argparse
import asyncio
import json
import os
import threading
from contextlib import contextmanager

import pytest
from sse_server import DONE, Server, event, failing, streaming, usage

from pagedjax.bench.command import add_arguments, main
from pagedjax.bench.options import parse_engine_option, parse_length, parse_slo, warmup_workload, workload
from pagedjax.bench.workload import LengthRange

STREAM = streaming(event(" a"), event(" b", finish="length"), usage(4, 2, cached=1), DONE, gap_s=0.01)
MODELS = failing(200, b'{"data": [{"id": "tiny"}]}')
ANSWERS = {"/v1/models": MODELS, "/v1/completions": STREAM, "/metrics": failing(404, b"")}
SHORT = ["--num-prompts", "5", "--input-len", "3", "--output-len", "2", "--num-warmups", "1"]


@contextmanager
def running_server(answers):
    """A server on a thread of its own, since the command runs event loops itself."""
    loop, started, server = asyncio.new_event_loop(), threading.Event(), Server(answers)

    async def start():
        await server.__aenter__()
        started.set()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(start()), loop.run_forever()))
    thread.start()
    started.wait(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def parse(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("words", [[], ["serve"], ["throughput"], ["latency"]])
def test_help_explains_and_succeeds(words, capsys):
    with pytest.raises(SystemExit) as leave:
        main([*words, "--help"])
    assert leave.value.code == 0
    assert "usage: pagedjax bench" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "MODE"),
        (["fly"], "invalid choice: 'fly'"),
        (["serve", "--num-prompts", "0"], "'0' is not a whole number of at least 1"),
        (["serve", "--num-prompts", "many"], "'many' is not a whole number"),
        (["serve", "--input-len", "9:3"], "1 <= low <= high"),
        (["serve", "--input-len", "x"], "neither a length nor LOW:HIGH"),
        (["serve", "--timeout", "0"], "'0' is not a number above 0"),
        (["serve", "--slo", "speed=3"], "'speed' is not one of ttft, tpot, itl, e2e"),
        (["serve", "--slo", "ttft=fast"], "'fast' is not a number above 0"),
        (["serve", "--engine", "dtype"], "'dtype' is not KEY=VALUE"),
        (["serve", "--extra-body", "[1]"], "must be a JSON object"),
        (["throughput", "--model", "m", "--request-rate", "2"], "--request-rate"),
    ],
)
def test_wrong_words_are_refused_by_the_parser(words, complaint, capsys):
    with pytest.raises(SystemExit) as leave:
        main(words)
    assert leave.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--url", "localhost:1"], "--url localhost:1 must begin with http"),
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1/v1/models"),
        (["--url", "http://h", "--engine", "dtype=float32"], "--engine sets up a server of our own"),
        (["--model", "m", "--server-pid", "1"], "--server-pid goes with --url"),
        (["--url", "http://h", "--dataset", "novel"], "--dataset novel: choose from random, shared-prefix, trace"),
        (["--url", "http://h", "--dataset", "trace"], "--dataset trace needs one FILE"),
        (["--url", "http://h", "--dataset", "random", "x"], "--dataset random takes no file"),
        (["--url", "http://h", "--dataset", "trace", "none.csv"], "none.csv: No such file"),
        (
            ["--url", "http://h", "--dataset", "trace", "a.csv", "--request-rate", "2"],
            "--request-rate does not go with",
        ),
        (["--url", "http://h", "--time-scale", "2"], "--time-scale does not go with --dataset random"),
        (["--url", "http://h", "--request-rate", "-1"], "--request-rate must be above 0"),
        (["--url", "http://h", "--burstiness", "0"], "--burstiness must be"),
        (["--url", "http://h", "--prompt-format", "ids", "--api", "chat"], "needs --api completions"),
        (["--url", "http://h", "--id-range", "1:5"], "--id-range needs --prompt-format ids"),
        (["--url", "http://h", "--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (["--url", "http://h", "--plot", "/nowhere/x.png"], "cannot write /nowhere/x.png"),
        (["--url", "http://h", "--plot", "x.txt"], "--plot x.txt: the name must end in one of"),
    ],
)
def test_words_that_do_not_go_together_are_refused_with_status_2(words, complaint, capsys):
    assert main(["serve", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_a_run_prints_a_table_and_writes_json_and_a_picture(tmp_path, capsys):
    out, picture = tmp_path / "run.json", tmp_path / "run.svg"
    with running_server(ANSWERS) as server:
        words = [
            "serve",
            "--url",
            server.url,
            *SHORT,
            "--slo",
            "ttft=60000",
            "--json",
            str(out),
            "--plot",
            str(picture),
        ]
        assert main(words) == 0
    table = capsys.readouterr().out
    assert "requests finished" in table
    assert "TTFT" in table
    assert picture.read_text().startswith("<?xml")
    report = json.loads(out.read_text())
    assert report["command"].startswith("pagedjax bench serve --url http://127.0.0.1:")
    assert report["settings"]["model"] == "tiny"
    assert report["settings"]["input_len"] == [3, 3]
    assert report["settings"]["slo"] == {"ttft": 60000.0, "tpot": None, "itl": None, "e2e": None}


def test_without_a_url_a_server_of_the_bundled_model_is_started(monkeypatch, tmp_path):
    started, out = [], tmp_path / "run.json"

    @contextmanager
    def serving(model, options, startup_timeout_s):
        started.append((model, options))
        with running_server(ANSWERS) as server:
            yield server.url, os.getpid()

    monkeypatch.setattr("pagedjax.bench.serve.serving", serving)
    assert main(["serve", *SHORT, "--engine", "max_num_seqs=4", "--json", str(out)]) == 0
    assert started == [("smollm2-135m", {"max_num_seqs": 4})]
    assert json.loads(out.read_text())["memory"]["host_peak_bytes"] > 0


def test_warm_up_requests_are_sent_but_not_counted(tmp_path):
    out = tmp_path / "run.json"
    with running_server(ANSWERS) as server:
        assert main(["serve", "--url", server.url, *SHORT, "--json", str(out)]) == 0
        prompts = [connection.body["prompt"] for connection in server.seen if connection.body]
    figures = json.loads(out.read_text())["figures"]
    assert len(prompts) == len(set(prompts)) == 6
    assert (figures["num_ok"], figures["input_tokens"], figures["output_tokens"]) == (5, 20, 10)
    assert figures["cached_tokens"] == 5


def test_a_run_without_a_single_success_ends_with_status_1(capsys):
    answers = ANSWERS | {"/v1/completions": failing(503, b'{"error": {"message": "draining"}}')}
    with running_server(answers) as server:
        assert main(["serve", "--url", server.url, *SHORT[:-1], "0"]) == 1
    assert "error x 5: HTTP 503: draining" in capsys.readouterr().out


def test_a_server_that_fails_all_warm_ups_is_refused(capsys):
    answers = ANSWERS | {"/v1/completions": failing(500, b"no")}
    with running_server(answers) as server:
        assert main(["serve", "--url", server.url, *SHORT]) == 2
    assert "every warm-up request failed: HTTP 500: no" in capsys.readouterr().err


def test_the_defaults_of_a_dataset_fill_in():
    assert {request.prompt_len for request in workload(parse("serve", "--url", "http://h"))} == {128}
    shared = workload(parse("serve", "--url", "http://h", "--dataset", "shared-prefix", "--input-len", "32"))
    assert len(shared) == 64
    assert {request.prompt_len for request in shared} == {544}
    assert len({request.prompt[:1000] for request in shared}) == 1


def test_warm_ups_leave_at_once_and_share_no_prefix_with_the_run():
    args = parse("serve", "--url", "http://h", "--dataset", "shared-prefix", "--request-rate", "1")
    warmups, requests = warmup_workload(args), workload(args)
    assert [request.due_s for request in warmups] == [0.0] * 4
    assert warmups[0].prompt[:100] != requests[0].prompt[:100]


@pytest.mark.parametrize(("text", "bounds"), [("128", (128, 128)), ("32:512", (32, 512)), ("4:4", (4, 4))])
def test_lengths_are_a_number_or_a_range(text, bounds):
    assert parse_length(text) == LengthRange(*bounds)


def test_bounds_are_in_milliseconds_by_name():
    slo = parse_slo("ttft=500, itl=50.5")
    assert (slo.ttft, slo.tpot, slo.itl, slo.e2e) == (500.0, None, 50.5, None)


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("dtype=bfloat16", ("dtype", "bfloat16")),
        ("max-num-seqs=32", ("max_num_seqs", 32)),
        ("enable_prefix_caching=false", ("enable_prefix_caching", False)),
        ("kv_cache_memory=0.5", ("kv_cache_memory", 0.5)),
    ],
)
def test_engine_options_are_json_or_text(text, option):
    assert parse_engine_option(text) == option
