"""What every route has in common: ids, limits, error bodies, counts and the log."""

import gzip
import logging
import re
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedjax.core.errors import ConfigError
from serving import edge
from serving.access.keys import KeySource
from serving.options import ApiOptions


def test_every_answer_has_an_id_of_the_server_s_making(client):
    first, second = (client.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"] for _ in range(2))
    assert len({first, second, "mine"}) == 3


def test_the_id_in_the_body_is_that_of_the_header(client):
    answer = client.complete()
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/", 405),
    ],
)
def test_wrong_paths_and_methods_have_openai_s_error_body(client, method, path, status):
    answer = client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in answer.headers) == (status == 405)


def test_a_body_over_the_limit_is_413(client_of, engine):
    small = client_of(engine, max_body_bytes=1000)
    assert small.complete(prompt="a" * 2000).status_code == 413
    assert small.complete(prompt="a" * 100).status_code == 200


def test_a_packed_body_is_415(client):
    answer = client.post("/v1/completions", content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")


def test_a_body_over_the_limit_is_413_without_a_content_length_too(client_of, engine):
    async def parts():
        for _ in range(50):
            yield b"a" * 100

    answer = client_of(engine, max_body_bytes=1000).request("POST", "/v1/completions", content=parts())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("num_sent", [30_000_000, 0])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_who_still_sends_gets_its_refusal_before_the_connection_is_closed(
    FakeEngine, serving_of, monkeypatch, caplog, version, num_sent
):
    caplog.set_level(logging.INFO, "serving")
    monkeypatch.setattr(edge, "LINGER_S", 5.0 if num_sent else 0.3)
    head = f"POST /v1/completions HTTP/{version}\r\nhost: a\r\nconnection: close\r\ncontent-length: 30000000\r\n\r\n"
    with (
        serving_of(FakeEngine()) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as client,
    ):
        client.sendall(head.encode() + bytes(num_sent))
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"413" in answer[:20] and b"body_too_large" in answer
    (duration_s,) = re.findall(r"status=413 duration_s=(\S+)", caplog.text)
    assert float(duration_s) < edge.LINGER_S


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://test"}, 200),
        ({"origin": "https://test"}, 200),
        ({"origin": "http://TEST:80"}, 200),
        ({"origin": "http://[::1]:8000", "host": "[::1]:8000"}, 200),
        ({"origin": "https://llm.example", "host": "llm.example:443"}, 200),
        ({"origin": "https://llm.example", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://evil.example", "sec-fetch-site": "none"}, 403),
        ({"origin": "http://test", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://test:8000"}, 403),
        ({"origin": "http://test.evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://test:99999"}, 403),
        ({"origin": "file://", "host": ""}, 403),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_a_page_s_origin_must_be_the_host_it_asks(client, engine, headers, status, kind):
    content = '{"model": "tiny", "prompt": "a"}'
    answer = client.request("POST", "/v1/completions", content=content, headers={"content-type": kind, **headers})
    assert answer.status_code == status
    assert len(engine.submitted) == (status == 200)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("a.localhost.", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.5", 200),
        ("MyBox:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("evil@localhost.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_pointed_at_this_machine_is_refused(client_of, engine, host, status):
    client = client_of(engine, options=ApiOptions(local_name="mybox"))
    # Such a page is one of the same origin.
    answer = client.get("/v1/models", headers={"host": host, "origin": f"http://{host}"})
    assert answer.status_code == status


def test_other_names_are_taken_with_keys_and_beyond_this_machine_and_where_they_are_allowed(client_of, engine):
    local = {"local_name": "127.0.0.1"}
    keyed = {"options": ApiOptions(**local), "keys": KeySource(secrets=(("user", "a-key-0123456789"),))}
    for options, expected in (
        (keyed, 200),
        ({}, 200),
        ({"options": ApiOptions(**local, allowed_hosts=frozenset({"llm.example"}))}, 200),
        ({"options": ApiOptions(allowed_hosts=frozenset({"other.example"}))}, 403),
    ):
        headers = {"host": "llm.example", "authorization": "Bearer a-key-0123456789"}
        assert client_of(engine, **options).get("/v1/models", headers=headers).status_code == expected


@pytest.mark.parametrize("name", ["http://llm.example", "llm.example:80", "Llm.example", "*.example"])
def test_an_allowed_host_that_is_no_name_is_a_config_error(name):
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        ApiOptions(allowed_hosts=frozenset({name}))


def test_headers_and_targets_over_the_limit_are_431(client):
    assert client.get("/health", headers={"x-large": "a" * 60_000}).status_code == 200
    for target, large in (("/health", "a" * 70_000), (f"/health?{'a' * 40_000}", "a" * 30_000)):
        answer = client.get(target, headers={"x-large": large})
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200)])
def test_pages_of_other_origins_cannot_use_the_model(client, site, status):
    answer = client.post("/v1/completions", {"model": "tiny", "prompt": "a"}, headers={"sec-fetch-site": site})
    assert answer.status_code == status


def test_a_fault_of_ours_is_500_and_tells_only_the_id(client, engine):
    engine.state = lambda: 1 / 0
    answer = client.get("/debug/state")
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
    assert "division" not in answer.text


def test_requests_are_counted_by_route_method_and_status(client):
    client.complete()
    client.complete(n=0)
    client.request("BREW", "/v1/completions")
    client.get("/some/path")
    series = samples(client)
    assert series["pagedjax_http_requests_total", "/v1/completions", "POST", "2xx"] == 1
    assert series["pagedjax_http_requests_total", "/v1/completions", "POST", "4xx"] == 1
    assert series["pagedjax_http_requests_total", "/v1/completions", "other", "4xx"] == 1
    assert series["pagedjax_http_requests_total", "unmatched", "GET", "4xx"] == 1
    assert series["pagedjax_http_errors_total", "invalid_request", "/v1/completions"] == 1
    assert series["pagedjax_http_requests_in_flight",] == 1


def test_metrics_include_the_engine_s(client, engine):
    from prometheus_client import Gauge

    Gauge("engine_gauge", "Of the engine.", registry=engine.registry).set(5)
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "engine_gauge 5.0" in answer.text


def test_the_log_has_one_line_a_request_and_never_the_prompt(client, caplog):
    caplog.set_level(logging.INFO, "serving")
    client.complete(prompt="my secret", user="somebody")
    client.complete(prompt="my secret", n=0)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "route=/v1/completions status=200" in lines[0]
    assert "stream=False prompt_tokens=9 output_tokens=13" in lines[0]
    assert "error=invalid_request" in lines[1]
    assert "secret" not in caplog.text


def test_models_are_listed_and_found_by_name(client):
    card = {"id": "tiny", "object": "model", "created": 1700000000, "owned_by": "pagedjax", "max_model_len": 200}
    (found,) = client.get("/v1/models").json()["data"]
    assert found == card | {"limits": found["limits"]}
    assert client.get("/v1/models/tiny").json() == found


def test_models_with_a_slash_too_many_are_told_where_they_are(client):
    assert "GET /v1/models lists" in client.get("/v1/models/").json()["error"]["message"]


def test_ready_says_why_it_is_not(client, engine):
    told = [client.get("/ready").json()["status"]]
    engine.full = True
    told.append(client.get("/ready").json()["status"])
    engine.full, engine.ready = False, False
    told.append(client.get("/ready").json()["status"])
    client.app.state.service.drain()
    told.append(client.get("/ready").json()["status"])
    assert told == ["ready", "queue full", "not ready", "draining"]


def test_health_is_the_engine_s_life_and_ready_its_will_to_take_requests(client, engine):
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 200)
    engine.ready = False
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 503)
    engine.alive = False
    assert client.get("/health").status_code == 503
    answer = client.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert "retry-after" in answer.headers
    assert engine.submitted == []


def test_a_draining_server_is_alive_unready_and_takes_nothing_new(client):
    client.app.state.service.drain()
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 503)
    assert client.get("/ready").headers["retry-after"] == "10"
    answer = client.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in answer.headers


def samples(client):
    """Value by (name, label values in order of the labels' names)."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    order = {"route": 1, "method": 2, "status": 3, "code": 0}
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels, key=lambda name: order.get(name, 9)))): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }
