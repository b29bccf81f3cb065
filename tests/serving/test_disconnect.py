"""A client that goes takes its sequences with it, streamed or not."""

import asyncio
import json
import socket

import pytest

from serving.app import create_app


async def call_and_leave(app, body, leave_after):
    """POST `body` and disconnect once `leave_after` messages were answered; gives those messages."""
    gone = asyncio.Event()
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent = []

    async def receive():
        if not incoming:
            await gone.wait()
        return incoming.pop() if incoming else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if len(sent) == leave_after:
            gone.set()

    if not leave_after:
        asyncio.get_running_loop().call_later(0.05, gone.set)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), 30)
    return sent


def leave(app, leave_after=0, **fields):
    return asyncio.run(call_and_leave(app, {"model": "tiny", "prompt": "a", "max_tokens": 99, **fields}, leave_after))


def test_leaving_before_the_answer_aborts_the_request(FakeEngine):
    engine = FakeEngine(hang=True)
    assert leave(create_app(engine)) == []
    assert len(engine.aborted) == 1


def test_leaving_in_mid_stream_aborts_the_request(FakeEngine):
    engine = FakeEngine(hang=True)
    sent = leave(create_app(engine), leave_after=2, stream=True)
    assert len(engine.aborted) == 1
    assert not any(b"DONE" in message.get("body", b"") or b"error" in message.get("body", b"") for message in sent)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_aborts_every_prompt_of_the_request(FakeEngine, stream):
    engine = FakeEngine(hang=True)
    leave(create_app(engine), prompt=["a", "b", "c"], stream=stream)
    assert len(engine.aborted) == 3


def test_an_answered_request_is_not_aborted(FakeEngine):
    engine = FakeEngine()
    leave(create_app(engine), leave_after=2)
    assert engine.aborted == []


def test_nothing_is_left_behind(FakeEngine):
    app = create_app(FakeEngine(hang=True))

    async def leave_and_look():
        await call_and_leave(app, {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 99}, 0)
        return len(app.state.service.active), len(asyncio.all_tasks())

    assert asyncio.run(leave_and_look()) == (0, 1)


def test_a_client_that_leaves_while_it_sends_its_body_is_no_error(FakeEngine, caplog):
    async def go():
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

        async def receive():
            return messages.pop(0)

        await create_app(FakeEngine())(scope, receive, None)

    asyncio.run(go())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_leaving_aborts_the_request_that_runs_where_more_were_sent_behind_it(FakeEngine, serving_of, wait_for, caplog):
    engine = FakeEngine(hang=True)
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 99}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    with serving_of(engine) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as client:
            client.sendall(3 * request)
            wait_for(lambda: engine.submitted)
        wait_for(lambda: engine.aborted)
    assert len(engine.submitted) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
