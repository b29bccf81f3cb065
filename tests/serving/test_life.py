"""Life cycle: deadlines, waits that are too long, steps that hang, loops that end, clients that are too slow."""

import socket
import threading
import time

import httpx
import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.engine.async_engine import AsyncEngine
from serving.app import create_app
from serving.options import ApiOptions
from serving.server import DrainingServer, bind
from tests.engine.fakes import make_engine

LONG = {"model": "counting", "prompt": "abc", "max_tokens": 60, "ignore_eos": True}


def ended(engine, outcome):
    return engine.metrics.registry.get_sample_value("pagedjax_requests_total", {"outcome": outcome})


@pytest.fixture
def hanging(FakeEngine):
    return FakeEngine(hang=True)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": "Hi", "max_tokens": 99}),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("responses", {"input": "Hi"}),
        ("embeddings", {"input": "Hi"}),
    ],
)
def test_a_request_that_has_its_own_limit_is_504_once_its_time_is_up(client_of, hanging, path, asked):
    hanging.reply = ()
    answer = client_of(hanging).post(f"/v1/{path}", {"model": "tiny", "timeout": 0.05, **asked})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert answer.json()["error"]["type"] == "server_error"
    assert hanging.outcomes == ["timeout"]


def test_the_server_s_limit_holds_for_those_who_ask_for_more(client_of, hanging):
    client = client_of(hanging, options=ApiOptions(request_timeout_s=0.05))
    answers = [client.complete(max_tokens=99), client.complete(max_tokens=99, timeout=1000)]
    assert [answer.status_code for answer in answers] == [504, 504]
    assert "0.05 s" in answers[1].json()["error"]["message"]


def test_a_stream_whose_time_is_up_ends_with_an_error_event(client_of, hanging, events):
    answer = client_of(hanging).complete(max_tokens=99, timeout=0.05, stream=True)
    last = events(answer)[-1]
    assert (answer.status_code, last["error"]["code"]) == (200, "deadline_exceeded")
    assert hanging.outcomes == ["timeout"]


def test_an_answer_in_time_is_none_the_worse_for_its_limit(client):
    assert client.complete(timeout=60).status_code == 200


@pytest.mark.parametrize("wrong", [0, -1, "soon", True, 1e9])
def test_a_limit_must_be_seconds(client, wrong):
    answer = client.complete(timeout=wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")


@pytest.mark.parametrize("name", ["request_timeout_s", "step_timeout_s"])
def test_limits_of_the_server_are_checked(name):
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        ApiOptions(**{name: -1.0})


def test_whoever_waits_too_long_for_a_first_step_is_504_and_leaves_nothing(serving_of, wait_for):
    """The clock stands still until the test moves it: the first request runs, the second one waits."""
    inner = make_engine(max_num_seqs=1, queue_timeout_s=5.0)
    now_s = [100.0]
    inner._now_us = inner._device._now_us = inner._watch._now_us = lambda: int(now_s[0] * 1e6)
    collect, gate = inner.runner.collect, threading.Semaphore(0)
    inner.runner.collect = lambda handle: gate.acquire() and collect(handle)
    engine = AsyncEngine(inner.config, lambda config: inner)
    answers = {}

    def ask(name):
        answers[name] = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60)

    with serving_of(engine) as server:
        first = threading.Thread(target=ask, args=["first"])
        first.start()
        wait_for(lambda: inner.state.running)
        second = threading.Thread(target=ask, args=["second"])
        second.start()
        wait_for(lambda: len(server._service.active) == 2)
        gate.release(2)
        wait_for(lambda: len(inner.state.waiting))
        now_s[0] += 6
        gate.release(1000)
        first.join(30)
        second.join(30)
        wait_for(lambda: not inner.state.pool.counts)
    assert answers["first"].status_code == 200
    assert (answers["second"].status_code, answers["second"].json()["error"]["code"]) == (504, "queue_timeout")
    assert (ended(engine, "timeout"), ended(engine, "length")) == (1, 1)


def test_a_step_that_hangs_is_told_by_health_and_metrics_and_ends_pending_requests_and_the_process(
    engine, monkeypatch, wait_for, caplog
):
    monkeypatch.setattr("serving.server.STUCK_GRACE_S", 2.0)
    engine.hang, engine.reply = True, ()
    server = DrainingServer(create_app(engine), bind("127.0.0.1", 0), 1.0)
    statuses, answers = [], []
    running = threading.Thread(target=lambda: statuses.append(server.serve_until_signal()))
    running.start()
    wait_for(lambda: server.started)
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 99}
    asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body)))
    asking.start()
    wait_for(lambda: engine.submitted)
    engine.step_age = 121.0
    health = httpx.get(f"{server.url}/health")
    shown = httpx.get(f"{server.url}/metrics").text
    asking.join(30)
    running.join(30)
    assert (health.status_code, health.json()) == (503, {"status": "stuck"})
    assert "pagedjax_engine_up 0.0" in shown and "pagedjax_engine_step_age_seconds 121.0" in shown
    assert statuses == [1] and engine.num_dumps == 1
    error = answers[0].json()["error"]
    assert (answers[0].status_code, error["code"]) == (500, "internal_error")
    assert answers[0].headers["x-request-id"] in error["message"]
    assert "event=engine_stuck step_age_s=121.0" in caplog.text


def test_a_step_that_comes_back_in_time_costs_nothing(engine, wait_for, caplog, serving_of):
    with serving_of(engine) as server:
        engine.step_age = 121.0
        wait_for(lambda: "event=engine_stuck" in caplog.text)
        engine.step_age = 0.0
        wait_for(lambda: "event=engine_back" in caplog.text)
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_without_a_limit_a_step_may_take_for_ever(client_of, engine):
    engine.step_age = 1e6
    assert client_of(engine, options=ApiOptions(step_timeout_s=0.0)).get("/health").status_code == 200
    assert client_of(engine).get("/health").status_code == 503


def test_a_step_loop_that_ends_fails_what_is_pending_and_ends_the_process(wait_for, monkeypatch):
    monkeypatch.setattr("serving.server.FAILED_GRACE_S", 0.5)
    inner = make_engine()
    inner.runner.die_at_plan = 2
    engine = AsyncEngine(inner.config, lambda config: inner)
    app = create_app(engine)
    server = DrainingServer(app, bind("127.0.0.1", 0), 1.0)
    statuses = []
    running = threading.Thread(target=lambda: statuses.append(server.serve_until_signal()))
    running.start()
    wait_for(lambda: server.started and app.state.service.readiness() == "ready")
    answer = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30)
    running.join(30)
    assert answer.status_code == 500 and answer.headers["x-request-id"] in answer.json()["error"]["message"]
    assert app.state.service.readiness() != "ready" and app.state.service.health() == "failed"
    assert statuses == [1]


@pytest.mark.parametrize("beginning", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_headers_that_do_not_come_close_the_connection(serving_of, engine, monkeypatch, beginning):
    monkeypatch.setattr("serving.protocol.HEADER_TIMEOUT_S", 0.2)
    with serving_of(engine) as server:
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(beginning)
            assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
            assert client.recv(1000) == b""


def test_the_time_limit_for_headers_does_not_end_an_answer(serving_of, FakeEngine, monkeypatch, wait_for):
    monkeypatch.setattr("serving.protocol.HEADER_TIMEOUT_S", 0.1)
    engine = FakeEngine(hang=True)
    began_s = time.monotonic()
    with serving_of(engine) as server:
        body = {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 99, "timeout": 0.5}
        text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).text
    assert "deadline_exceeded" in text and time.monotonic() - began_s >= 0.5
