"""Over a socket: OpenAI's own client, draining, and the ways a start can fail."""

import contextlib
import socket
import sys
import threading

import httpx
import openai
import pytest

from pagedjax.core.errors import ConfigError
from serving.app import create_app
from serving.server import DrainingServer, bind, serve


@pytest.fixture
def served(serving_of, engine):
    with serving_of(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


USER = [{"role": "user", "content": "Hi"}]


def test_openai_s_client_gets_a_completion(served):
    answer = served.completions.create(model="tiny", prompt="Hi", logprobs=2, echo=True, max_tokens=5)
    assert answer.choices[0].text == "HiHello"
    assert answer.choices[0].logprobs.tokens == list("HiHello")
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_openai_s_client_streams_a_completion(served):
    with served.completions.create(model="tiny", prompt="Hi", stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world"


def test_openai_s_client_gets_a_chat_answer(served):
    answer = served.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=3, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello, world"] * 2
    first = answer.choices[0].logprobs.content[0]
    assert (first.token, first.bytes, [top.token for top in first.top_logprobs]) == ("H", [72], ["I", "J", "H"])


def test_openai_s_client_streams_a_chat_answer_with_usage(served):
    options = {"include_usage": True}
    with served.chat.completions.create(model="tiny", messages=USER, stream=True, stream_options=options) as stream:
        *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world"
    assert last.usage.completion_tokens == 13


def test_openai_s_client_sees_our_refusals_as_its_own_errors(served):
    with pytest.raises(openai.BadRequestError) as refusal:
        served.completions.create(model="tiny", prompt="Hi", temperature=9)
    assert refusal.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        served.completions.create(model="other", prompt="Hi")


def test_openai_s_client_sees_a_failure_in_mid_stream(serving_of, FakeEngine):
    with (
        serving_of(FakeEngine(fail_after=2)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(model="tiny", prompt="Hi", stream=True) as stream,
        pytest.raises(openai.APIError, match="failed"),
    ):
        list(stream)


def test_a_body_over_the_limit_is_413_over_a_socket(serving_of, engine):
    with serving_of(engine, max_body_bytes=1000) as server:
        answer = httpx.post(f"{server.url}/v1/completions", content=b"a" * 10_000_000)
    assert answer.status_code == 413


def test_a_client_killed_in_mid_stream_aborts_its_request(serving_of, FakeEngine, wait_for):
    engine = FakeEngine(hang=True)
    with serving_of(engine) as server:
        body = {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 99}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            next(answer.iter_bytes())
        wait_for(lambda: engine.aborted)


def test_the_engine_starts_and_stops_with_the_server(serving_of, engine):
    with serving_of(engine):
        assert engine.started
        assert not engine.stopped
    assert engine.stopped


def test_draining_refuses_the_new_and_the_second_signal_ends_the_running(serving_of, FakeEngine, wait_for):
    engine = FakeEngine(hang=True)
    with serving_of(engine, drain_timeout_s=300) as server:
        url, answers = f"{server.url}/v1/completions", []
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 99}
        running = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body)))
        running.start()
        wait_for(lambda: engine.submitted)
        server.handle_exit(15, None)
        wait_for(lambda: engine.draining)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.post(url, json=body).status_code == 503
        server.handle_exit(15, None)
        running.join(30)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutting_down")
    assert len(engine.aborted) == 1


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(serving_of, FakeEngine):
    with serving_of(FakeEngine(hang=True), drain_timeout_s=0.2) as server:
        body = {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 99}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            server.handle_exit(15, None)
            text = answer.read().decode()
    assert "shutting_down" in text.split("\n\n")[-2]


def test_a_drain_does_not_wait_for_a_body_that_is_on_its_way(serving_of, engine, wait_for):
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    with serving_of(engine, drain_timeout_s=300) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=3) as client:
            client.sendall(head.encode())
            # The request for the metrics is the second.
            wait_for(lambda: "requests_in_flight 2.0" in httpx.get(f"{server.url}/metrics").text)
            server.handle_exit(15, None)
            answer = client.recv(10_000).decode()
        wait_for(lambda: engine.stopped)
    assert answer.startswith("HTTP/1.1 503 ")
    assert '"code":"draining"' in answer


def connected(server):
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n"


@pytest.mark.parametrize(
    "beginning",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: ",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-",
        b"GET /",
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nx-large: ",
        CHUNKED + b"1;",
        CHUNKED + b"0\r\nx-large: ",
    ],
)
def test_headers_without_an_end_close_the_connection(serving_of, engine, beginning):
    sent = 0
    with serving_of(engine) as server, connected(server) as client:
        client.sendall(beginning)
        # Bounded, so that a server without the limit fails the test.
        with contextlib.suppress(ConnectionError):
            while sent < 50_000_000:
                sent += client.send(b"a" * 10_000)
    # Far more than the limit and what the sockets hold.
    assert sent < 20_000_000


def test_headers_over_the_limit_are_told_so(serving_of, engine):
    with serving_of(engine) as server, connected(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: " + b"a" * 66_000)
        assert client.recv(10_000).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("rest", [b"a" * 66_000, b"a" * 200_000 + b"\r\n\r\n"])
def test_without_httptools_headers_are_bounded_too(serving_of, engine, monkeypatch, rest):
    monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    with serving_of(engine) as server, connected(server) as client:
        assert server.config.http.__name__ == "H11Protocol"
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: " + rest)
        assert client.recv(10_000).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_many_requests_and_a_large_body_on_a_connection_are_not_headers(serving_of, engine):
    with serving_of(engine) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(12):
            assert client.get("/health", headers={"x-large": "a" * 30_000}).status_code == 200
        parts = (b'{"model": "tiny", "prompt": "a"}'.ljust(90_000) for _ in range(1))
        assert client.post("/v1/completions", content=parts).status_code == 200


def test_a_client_that_closes_its_sending_half_counts_as_gone(serving_of, FakeEngine, wait_for):
    engine = FakeEngine(hang=True)
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 99}'
    with serving_of(engine) as server, connected(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: engine.submitted)
        client.shutdown(socket.SHUT_WR)
        wait_for(lambda: engine.aborted)
        assert client.recv(100) == b""


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "127.0.0.1"), ("Localhost", "localhost"), ("0.0.0.0", None)])
def test_a_server_knows_whether_only_this_machine_reaches_it(monkeypatch, engine, host, name):
    apps = []

    class Stopped:
        def __init__(self, app, *_):
            apps.append(app)

        def serve_until_signal(self):
            return 0

    monkeypatch.setattr("serving.server.DrainingServer", Stopped)
    assert serve(lambda: engine, host=host, port=0) == 0
    assert apps[0].state.service.options.local_name == name


def test_an_idle_server_leaves_at_once(serving_of, engine, wait_for):
    with serving_of(engine, drain_timeout_s=60) as server:
        server.handle_exit(2, None)
        wait_for(lambda: engine.stopped)


def test_a_port_in_use_is_found_before_the_engine_is_made():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            serve(lambda: pytest.fail("made an engine"), port=taken.getsockname()[1])


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70_000)])
def test_an_address_that_cannot_be_used_is_a_config_error(host, port):
    with pytest.raises(ConfigError):
        bind(host, port)


def test_what_goes_wrong_at_the_engine_s_start_is_raised_as_it_is(engine):
    engine.start_error = ConfigError("too little memory; lower --kv-cache-memory")
    with pytest.raises(ConfigError, match="kv-cache-memory"):
        serve(lambda: engine, port=0)


def test_while_the_model_loads_the_server_is_alive_and_not_ready(serving_of, engine):
    engine.loading = True
    with serving_of(engine) as server:
        statuses = [httpx.get(server.url + path).status_code for path in ("/health", "/", "/metrics", "/ready")]
        refusal = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert statuses == [200, 200, 200, 503]
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "not_ready")
    assert not engine.stopped


def test_ready_is_told_once_the_engine_has_started(engine):
    told = []

    def tell(url):
        told.append((url, engine.started))
        server.handle_exit(15, None)

    server = DrainingServer(create_app(engine), bind("127.0.0.1", 0), 1.0, on_ready=tell)
    assert server.serve_until_signal() == 0
    ((url, has_started),) = told
    assert url.startswith("http://127.0.0.1:") and has_started


def test_an_engine_that_stays_dead_ends_the_process_with_an_error(engine, monkeypatch):
    monkeypatch.setattr("serving.server.FAILED_GRACE_S", 0.2)
    engine.alive = False
    server = DrainingServer(create_app(engine), bind("127.0.0.1", 0), 1.0)
    assert server.serve_until_signal() == 1


def test_a_signal_while_the_model_loads_leaves_at_once_with_its_number(engine):
    engine.loading = True
    server = DrainingServer(create_app(engine), bind("127.0.0.1", 0), 60.0)
    threading.Timer(0.3, server.handle_exit, (15, None)).start()
    assert server.serve_until_signal() == 143
    assert not engine.stopped
