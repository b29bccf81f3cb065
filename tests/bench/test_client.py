"""The load client against a server that answers byte for byte what a test says."""

import asyncio
import os
import signal

import pytest
from sse_server import DONE, Connection, Server, event, failing, sse, streaming, usage

from pagedjax.bench.client import (
    SseParser,
    Target,
    normalise_url,
    run_load,
    served_device_peak_bytes,
    served_models,
)
from pagedjax.bench.metrics import Status, chunk_token_counts, timeline, token_gaps_s
from pagedjax.bench.workload import BenchRequest
from pagedjax.core.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def make_requests(num=1, prompt="the of", **fields):
    return [BenchRequest(**({"due_s": 0.0, "prompt": prompt, "prompt_len": 2, "max_tokens": 3} | fields))] * num


def load(answers, requests=None, *, max_concurrency=None, **target):
    """Run the requests against a server with these answers: (result, server)."""

    async def go():
        async with Server(answers) as server:
            result = await run_load(
                Target(url=server.url, model="m", **target),
                requests or make_requests(),
                max_concurrency=max_concurrency,
            )
        return result, server

    return asyncio.run(go())


def only_record(answer, **target):
    return load({COMPLETIONS: answer}, **target)[0].records[0]


def test_a_stream_becomes_chunks_usage_and_finish_reason():
    pieces = (event(" a"), event(" bc"), event("", finish="length"), usage(7, 3, cached=4), DONE)
    record = only_record(streaming(*pieces, gap_s=0.01))
    assert record.status is Status.OK
    assert [chunk.text_len for chunk in record.chunks] == [2, 3]
    assert (record.prompt_len, record.output_len, record.cached_len) == (7, 3, 4)
    assert record.finish_reason == "length"
    assert record.start_s < record.chunks[0].time_s < record.chunks[1].time_s <= record.end_s


def test_ttft_waits_for_the_first_text():
    record = only_record(streaming(event(""), event(" a"), DONE, gap_s=0.05))
    assert record.ttft_s >= 0.05
    assert len(record.chunks) == 1


def test_events_that_arrive_together_are_one_chunk():
    record = only_record(streaming(event(" a"), event(" b") + event(" c"), usage(2, 3) + DONE, gap_s=0.05))
    assert [chunk.text_len for chunk in record.chunks] == [2, 4]
    assert chunk_token_counts(record) == [1, 2]
    assert token_gaps_s(record)[0] == token_gaps_s(record)[1] >= 0.02


def test_token_ids_tell_the_tokens_of_a_chunk():
    held_back = event("", token_ids=[1])
    record = only_record(
        streaming(held_back, event(" ab", token_ids=[2]), event(" c", token_ids=[3]), DONE, gap_s=0.01)
    )
    assert [chunk.num_tokens for chunk in record.chunks] == [2, 1]
    assert record.output_len == 3


def test_without_usage_the_client_counts_chunks():
    record = only_record(streaming(event(" a"), event(" b"), DONE, gap_s=0.01))
    assert (record.prompt_len, record.output_len, record.cached_len) == (2, 2, None)


def test_an_event_may_be_torn_anywhere():
    whole = event(" é", finish="stop") + DONE
    pieces = [whole[index : index + 1] for index in range(len(whole))]
    record = only_record(streaming(*pieces))
    assert record.status is Status.OK
    assert [chunk.text_len for chunk in record.chunks] == [2]


def test_chat_deltas_carry_text_and_the_prompt_is_a_message():
    delta = sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": " hi"}, "finish_reason": "stop"}]})
    result, server = load({CHAT: streaming(delta, DONE)}, api="chat")
    assert result.records[0].status is Status.OK
    assert server.seen[0].body["messages"] == [{"role": "user", "content": "the of"}]


def test_the_body_asks_for_greedy_text_of_the_full_length_with_usage():
    _, server = load({COMPLETIONS: streaming(event(" a"), DONE)}, make_requests(prompt=(5, 6)), api_key="secret")
    assert server.seen[0].body == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.seen[0].headers["authorization"] == "Bearer secret"


def test_the_extra_body_wins_and_ignore_eos_can_be_left_out():
    answers = {COMPLETIONS: streaming(event(" a"), DONE)}
    _, server = load(answers, ignore_eos=False, extra_body={"temperature": 0.5, "top_k": 3})
    assert "ignore_eos" not in server.seen[0].body
    assert (server.seen[0].body["temperature"], server.seen[0].body["top_k"]) == (0.5, 3)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (failing(429, b'{"error": {"message": "queue full", "code": "queue_full"}}'), "HTTP 429: queue full"),
        (failing(500, b"<html>oops"), "HTTP 500: <html>oops"),
        (streaming(event(" a"), sse({"error": {"message": "engine died"}})), "engine died"),
        (streaming(event(" a")), "the stream ended early"),
        (streaming(event("", finish="stop"), DONE), "the response carries no text"),
        (streaming(b"data: {nonsense\n\n"), "JSONDecodeError"),
        (streaming(b"data: [1]\n\n"), "AttributeError"),
    ],
)
def test_faults_of_the_server_become_the_records_error(answer, error):
    record = only_record(answer)
    assert record.status is Status.FAILED
    assert record.error.startswith(error)


def test_a_connection_cut_mid_stream_is_a_failure():
    async def cut(connection: Connection) -> None:
        await connection.head()
        await connection.piece(event(" a"))

    record = only_record(cut)
    assert record.status is Status.FAILED
    assert "ClientPayloadError" in record.error
    assert len(record.chunks) == 1


def test_nobody_listening_is_a_failure_and_not_a_crash():
    result = asyncio.run(run_load(Target(url="http://127.0.0.1:1", model="m"), make_requests(2)))
    assert [record.status for record in result.records] == [Status.FAILED] * 2
    assert "127.0.0.1:1" in result.records[0].error


def test_a_request_that_hangs_times_out():
    async def hang(connection: Connection) -> None:
        await connection.head()
        await asyncio.sleep(1.0)

    record = only_record(hang, timeout_s=0.1)
    assert (record.status, record.error) == (Status.FAILED, "timed out after 0.1 s")


def test_one_failure_leaves_the_others_alone():
    async def sometimes(connection: Connection) -> None:
        answer = failing(500, b"no") if connection.body["prompt"] == "bad" else streaming(event(" a"), DONE)
        await answer(connection)

    requests = [*make_requests(2), *make_requests(prompt="bad"), *make_requests(2)]
    result, _ = load({COMPLETIONS: sometimes}, requests)
    assert [record.status for record in result.records] == ["ok", "ok", "failed", "ok", "ok"]


@pytest.mark.parametrize(("limit", "most"), [(2, 2), (None, 6)])
def test_the_concurrency_limit_holds_requests_back(limit, most):
    answers = {COMPLETIONS: streaming(event(" a"), DONE, gap_s=0.05)}
    result, _ = load(answers, make_requests(6), max_concurrency=limit)
    assert max(running for _, running, _ in timeline(result.records)) == most


def test_requests_leave_when_they_are_due():
    requests = [*make_requests(due_s=0.2), *make_requests(due_s=0.0)]
    result, _ = load({COMPLETIONS: streaming(event(" a"), DONE)}, requests)
    late, early = result.records
    assert early.start_s < 0.2 <= late.start_s
    assert result.wall_s == max(early.end_s, late.end_s)


def test_ctrl_c_keeps_what_is_done_and_marks_the_rest():
    async def slow_second(connection: Connection) -> None:
        if connection.body["prompt"] == "slow":
            await connection.head()
            await connection.piece(event(" a"))
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.5)
        else:
            await streaming(event(" a"), DONE)(connection)

    requests = [*make_requests(), *make_requests(prompt="slow", due_s=0.1), *make_requests(due_s=9.0)]
    result, _ = load({COMPLETIONS: slow_second}, requests)
    assert result.interrupted
    assert [record.status for record in result.records] == [Status.OK, Status.INTERRUPTED]
    assert result.wall_s < 5.0


@pytest.mark.parametrize(
    ("pieces", "payloads"),
    [
        ([b"data: a\n\ndata:b\n\n"], [b"a", b"b"]),
        ([b"data: a\r\n\r\n"], [b"a"]),
        ([b"da", b"ta: a\n", b"\n"], [b"a"]),
        ([b": ping\n\nevent: x\nid: 1\ndata: a\n\n"], [b"a"]),
        ([b"data: a\ndata: b\n\n"], [b"a\nb"]),
        ([b"data: a\n"], []),
    ],
)
def test_server_sent_events_are_split_as_the_standard_says(pieces, payloads):
    parser = SseParser()
    assert [payload for piece in pieces for payload in parser.feed(piece)] == payloads


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_addresses_may_end_in_v1_or_not(url):
    assert normalise_url(url) == "http://h:1"


def test_an_address_needs_its_scheme():
    with pytest.raises(ConfigError, match="--url localhost:8000 must begin with"):
        normalise_url("localhost:8000")


def fetch(answers, function):
    async def go():
        async with Server(answers) as server:
            return await function(server.url)

    return asyncio.run(go())


def test_the_served_models_are_listed():
    assert fetch({"/v1/models": failing(200, b'{"data": [{"id": "m1"}, {"id": "m2"}]}')}, served_models) == ["m1", "m2"]


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [(404, b"gone", "answers 404: gone"), (200, b"hello", "not answer like"), (200, b'{"data": 1}', "not answer like")],
)
def test_a_server_of_another_kind_is_refused(status, body, complaint):
    with pytest.raises(ConfigError, match=complaint):
        fetch({"/v1/models": failing(status, body)}, served_models)


def test_no_server_is_refused_by_its_address():
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:1"):
        asyncio.run(served_models("http://127.0.0.1:1"))


def test_device_memory_comes_from_the_metrics_page_where_it_tells():
    page = b"# HELP x\npagedjax_device_memory_peak_bytes 2048.0\nother 3\n"
    assert fetch({"/metrics": failing(200, page)}, served_device_peak_bytes) == 2048
    assert fetch({"/metrics": failing(200, b"other 3\n")}, served_device_peak_bytes) is None
    assert fetch({"/metrics": failing(404, b"")}, served_device_peak_bytes) is None
