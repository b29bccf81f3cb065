"""The access log: a line a request, what it holds, and what it never holds."""

import json
import logging

import pytest

from pagedjax.core.errors import ConfigError
from serving.access.keys import KeySource
from serving.options import ApiOptions
from serving.telemetry import access_log
from tests.serving.conftest import Client, FakeEngine, create_app

USER, ADMIN = "user-key-0123456789", "admin-key-0123456789"


@pytest.fixture
def lines(caplog):
    """`lines()`: what the log has so far."""
    caplog.set_level(logging.INFO, "serving.telemetry.access_log")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "serving.telemetry.access_log"]


def client(form, keys=KeySource()):  # noqa: B008
    return Client(create_app(FakeEngine(), keys=keys, options=ApiOptions(access_log=form)))


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_a_line_of_json_says_who_asked_what_how_much_and_how_long(lines):
    answer = client("json").complete(stream=True)
    (line,) = map(json.loads, lines())
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["tenant"], line["stream"], line["prompt_tokens"], line["output_tokens"]) == ("default", True, 2, 13)
    assert 0 < line["first_byte_s"] <= line["duration_s"] < 60
    assert 1.7e9 < line["time"] < 1e11


def test_refused_requests_have_their_line_too_with_the_reason(lines):
    keyed = client("json", KeySource(None, (("user", USER), ("admin", ADMIN))))
    keyed.complete()
    keyed.post("/v1/completions?token=secret", {"model": "tiny", "prompt": "secret", "n": 0}, headers=bearer(USER))
    first, last = map(json.loads, lines())
    assert (first["status"], first["error"], first["tenant"]) == (401, "missing_api_key", "default")
    assert (last["status"], last["error"], last["key"]) == (400, "invalid_request", "environment-user")


def test_neither_prompts_nor_answers_nor_keys_nor_queries_are_in_it(lines):
    keyed = client("json", KeySource(None, (("user", USER),)))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "private words"}], "user": "somebody"}
    for key in (USER, "a-wrong-secret-0123456789"):
        keyed.post("/v1/chat/completions?key=hidden", body, headers=bearer(key))
    keyed.get("/v1/models/private", headers=bearer(USER))
    assert len(lines()) == 3
    for word in ("private", "Hello", "0123456789", "hidden", "somebody"):
        assert word not in "".join(lines())


def test_what_probes_and_pages_ask_all_the_time_has_no_line(lines):
    for path in ("/health", "/ready", "/metrics", "/debug/state"):
        client("json").get(path)
    assert lines() == []


def test_off_is_off(lines):
    client("off").complete()
    assert lines() == []


def test_json_goes_to_standard_output_alone_and_whatever_the_log_s_level(capsys):
    log = logging.getLogger("serving")
    before = log.level
    try:
        access_log.begin_json()
        log.setLevel(logging.ERROR)
        client("json").complete()
    finally:
        log.setLevel(before)
        access_log.log.handlers.clear()
        access_log.log.propagate = True
        access_log.log.setLevel(logging.NOTSET)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["route"] == "/v1/completions" and shown.err == ""


def test_a_form_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="--access-log"):
        ApiOptions(access_log="xml")
