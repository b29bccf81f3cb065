"""API keys: who is let in, what a key limits, and that nothing of it reaches a log."""

import asyncio
import base64
import logging
import re

import httpx
import openai
import pytest

from pagedjax.cli import run
from pagedjax.core.errors import ConfigError, RequestError
from serving.access import keys
from serving.access.keys import ApiKey, KeySource, read_keys
from serving.access.limits import Limits
from serving.app import ROUTES, create_app
from serving.options import ApiOptions
from tests.serving.conftest import Client, FakeEngine

USER, ADMIN, GOLD = "user-key-0123456789", "admin-key-0123456789", "gold-key-0123456789"
FILE = f"""
[[keys]]
name = "alice"
key = "{USER}"
tenant = "alice"
[[keys]]
name = "root"
hash = "{keys.shown_hash(ADMIN)}"
role = "admin"
[[keys]]
name = "gold"
hash = "{keys.shown_hash(GOLD)}"
tenant = "gold"
priority_cap = 0
queue_share = 0.001
"""
ADMIN_ROUTES = {route.path for route in ROUTES if route.path.startswith(("/admin/", "/debug/", "/metrics"))}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def keyed(engine, key_file):
    return Client(create_app(engine, keys=KeySource(str(key_file))))


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def every_route():
    """(method, path with its parameters filled in) of the whole table."""
    for route in ROUTES:
        for method in sorted(route.methods):
            yield method, re.sub(r"\{[^}]*\}", "x", route.path)


@pytest.mark.parametrize(("method", "path"), list(every_route()))
def test_every_route_but_liveness_asks_for_a_key(keyed, engine, method, path):
    for headers in ({}, bearer("wrong"), {"authorization": "Bearer"}, {"authorization": f"Digest {USER}"}):
        answer = keyed.request(method, path, headers=headers, json={"model": "tiny", "prompt": "a"})
        assert answer.status_code == (200 if path == "/health" else 401)
        if path != "/health" and method != "HEAD":
            assert answer.json()["error"]["type"] == "authentication_error"
            assert "bearer" in answer.headers["www-authenticate"].lower()
    assert not engine.submitted and not engine.draining


@pytest.mark.parametrize("path", sorted(ADMIN_ROUTES))
def test_admin_routes_are_closed_to_users(keyed, path):
    (route,) = [route for route in ROUTES if route.path == path]
    for method in route.methods:
        answer = keyed.request(method, path.replace("{request_id}", "x"), headers=bearer(USER))
        assert answer.status_code == 403


def test_unknown_paths_ask_for_a_key_too(keyed):
    assert keyed.get("/nothing").status_code == 401
    assert keyed.get("/nothing", headers=bearer(USER)).status_code == 404


@pytest.mark.parametrize("path", sorted(path for path in ADMIN_ROUTES if path.startswith("/admin/")))
def test_without_keys_nobody_is_an_admin(client, path):
    (route,) = [route for route in ROUTES if route.path == path]
    for method in route.methods:
        assert client.request(method, path.replace("{request_id}", "x")).status_code == 403


def test_a_key_names_the_tenant(keyed, engine):
    keyed.complete_as = lambda key: keyed.post("/v1/completions", {"model": "tiny", "prompt": "a"}, headers=bearer(key))
    assert [keyed.complete_as(key).status_code for key in (USER, ADMIN, GOLD)] == [200] * 3
    assert engine.tenants == ["alice", "default", "gold"]


def test_browsers_may_give_the_key_as_a_password(keyed):
    basic = base64.b64encode(f"anybody:{USER}".encode()).decode()
    assert keyed.get("/", headers={"authorization": f"Basic {basic}"}).status_code == 200
    assert keyed.get("/", headers={"authorization": "Basic !!!"}).status_code == 401


def test_a_user_s_key_opens_what_the_page_needs_to_chat(keyed):
    statuses = {
        path: keyed.get(path, headers=bearer(USER)).status_code
        for path in ("/", "/ready", "/v1/models", "/debug/state")
    }
    assert statuses == {"/": 200, "/ready": 200, "/v1/models": 200, "/debug/state": 403}


def test_openai_s_client_sends_the_key(serving_of, engine, key_file):
    with serving_of(engine, keys=KeySource(str(key_file))) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key=USER, max_retries=0) as client:
            assert client.models.list().data[0].id == "tiny"
        wrong = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_a_better_priority_than_the_key_allows_is_403(keyed, engine):
    body = {"model": "tiny", "prompt": "a"}
    refused = keyed.post("/v1/completions", body | {"priority": -1}, headers=bearer(GOLD))
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
    assert keyed.post("/v1/completions", body | {"priority": 3}, headers=bearer(GOLD)).status_code == 200


def test_a_key_fills_its_share_of_the_queue_only(engine, key_file):
    app = create_app(engine, keys=KeySource(str(key_file)))
    answer = Client(app).post("/v1/completions", {"model": "tiny", "prompt": "a", "n": 5}, headers=bearer(GOLD))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert answer.headers["retry-after"]


def limited(engine, **limits):
    """An app with one key of these limits, and its clock."""
    app, now = create_app(engine), [0.0]
    service = app.state.service
    service.keys = (ApiKey(name="one", digest=keys.digest(USER), **limits),)
    service.limits = Limits(lambda: now[0])
    return Client(app), now


def test_requests_a_minute_are_counted_and_told(engine):
    client, now = limited(engine, requests_per_minute=2)
    ask = lambda: client.post("/v1/completions", {"model": "tiny", "prompt": "ab"}, headers=bearer(USER))  # noqa: E731
    first, second, third = ask(), ask(), ask()
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [one.headers["x-ratelimit-remaining-requests"] for one in (first, second, third)] == ["1", "0", "0"]
    assert third.headers["retry-after"] == "30"
    assert third.json()["error"]["type"] == "rate_limit_error"
    now[0] = 30.0
    assert ask().status_code == 200
    assert ask().status_code == 429


def test_tokens_a_minute_count_prompt_and_output(engine):
    client, now = limited(engine, tokens_per_minute=20)
    ask = lambda prompt: client.post("/v1/completions", {"model": "tiny", "prompt": prompt}, headers=bearer(USER))  # noqa: E731
    assert ask("ab").headers["x-ratelimit-remaining-tokens"] == "18"
    # "Hello, world" and its end have 13 tokens.
    assert (ask("abcdef").status_code, ask("abcde").status_code) == (429, 200)
    assert ask("a").status_code == 429
    assert ask("a" * 21).json()["error"]["code"] == "rate_limit_exceeded"
    now[0] = 60.0
    assert ask("a" * 21).status_code == 400
    assert ask("a").status_code == 200


def test_admins_see_the_queue_and_end_a_request(serving_of, key_file):
    engine = FakeEngine(hang=True)
    with serving_of(engine, keys=KeySource(str(key_file))) as server:
        statuses = asyncio.run(watch_and_abort(server.url))
    assert statuses == [404, 404, 200, 499]
    assert engine.aborted


async def watch_and_abort(url):
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        body = {"model": "tiny", "prompt": "a"}
        asked = asyncio.ensure_future(client.post("/v1/completions", json=body, headers=bearer(USER)))
        while not (found := (await client.get("/admin/queue", headers=bearer(ADMIN))).json()["requests"]):
            await asyncio.sleep(0.01)
        assert [(one["tenant"], one["prompt_tokens"]) for one in found] == [("alice", 1)]
        assert found[0]["id"].startswith("cmpl-")
        tries = [
            (f"/v1/requests/{found[0]['id']}/cancel", GOLD),
            ("/v1/requests/nobody/cancel", USER),
            (f"/admin/abort/{found[0]['id']}", ADMIN),
        ]
        answers = [await client.post(path, headers=bearer(key)) for path, key in tries]
        return [answer.status_code for answer in (*answers, await asked)]


def test_draining_by_an_admin_refuses_what_is_new(keyed):
    assert keyed.post("/admin/drain", headers=bearer(ADMIN)).json() == {"status": "draining", "active": 0}
    answer = keyed.post("/v1/completions", {"model": "tiny", "prompt": "a"}, headers=bearer(USER))
    assert answer.status_code == 503
    assert keyed.get("/health").status_code == 200


def test_keys_are_read_again_and_a_broken_file_changes_nothing(keyed, key_file):
    key_file.write_text(FILE.replace(USER, "another-key-0123456789"))
    assert keyed.post("/admin/reload-keys", headers=bearer(ADMIN)).json() == {"keys": 3}
    assert keyed.get("/v1/models", headers=bearer(USER)).status_code == 401
    key_file.write_text("[[keys]]\nkey = ")
    assert keyed.post("/admin/reload-keys", headers=bearer(ADMIN)).status_code == 400
    assert keyed.get("/v1/models", headers=bearer("another-key-0123456789")).status_code == 200


def test_the_log_level_can_be_changed(keyed):
    before = logging.getLogger("serving").level
    try:
        put = lambda level: keyed.request("PUT", "/admin/log-level", json={"level": level}, headers=bearer(ADMIN))  # noqa: E731
        assert put("error").json() == {"level": "error"}
        assert not logging.getLogger("serving").isEnabledFor(logging.INFO)
        assert put("loud").status_code == 400
        assert keyed.get("/admin/log-level", headers=bearer(ADMIN)).json() == {"level": "error"}
    finally:
        for package in ("pagedjax", "serving", "pallas_kernels"):
            logging.getLogger(package).setLevel(before)


def test_a_profile_is_taken_into_the_directory_that_was_set_up(engine, key_file):
    options = ApiOptions(profile_dir="/tmp/profiles")
    profiled = Client(create_app(engine, keys=KeySource(str(key_file)), options=options))
    answer = profiled.post("/admin/profile", {"seconds": 2}, headers=bearer(ADMIN))
    assert answer.json() == {"directory": "/tmp/profiles", "seconds": 2.0}
    assert profiled.post("/admin/profile", headers=bearer(ADMIN)).json()["seconds"] == 1.0
    assert engine.profiles == [("/tmp/profiles", 2.0), ("/tmp/profiles", 1.0)]
    for body in ({"seconds": 0}, {"seconds": 61}, {"seconds": "1"}, {"directory": "/etc"}):
        assert profiled.post("/admin/profile", body, headers=bearer(ADMIN)).status_code == 400


def test_without_a_directory_no_profile_is_taken(keyed, engine):
    answer = keyed.post("/admin/profile", {"seconds": 1}, headers=bearer(ADMIN))
    assert answer.status_code == 400 and "--profile-dir" in answer.json()["error"]["message"]
    assert engine.profiles == []


def test_a_second_profile_is_a_conflict(engine, key_file):
    async def busy(directory, duration_s):
        raise RequestError("another profile is being taken", code="profile_running")

    engine.profile = busy
    options = ApiOptions(profile_dir="/tmp/profiles")
    profiled = Client(create_app(engine, keys=KeySource(str(key_file)), options=options))
    assert profiled.post("/admin/profile", headers=bearer(ADMIN)).status_code == 409


def test_no_key_and_no_prompt_reaches_the_log(keyed, caplog):
    caplog.set_level(logging.DEBUG)
    for key in (USER, "a-wrong-secret-0123456789"):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "my private words"}]}
        keyed.post("/v1/chat/completions", body, headers=bearer(key))
        keyed.post("/v1/completions", {"model": "tiny", "prompt": ["my private words", 5]}, headers=bearer(key))
    logged = "\n".join(record.getMessage() for record in caplog.records if not record.name.startswith("httpx"))
    assert "key=alice" in logged
    assert not re.search(r"private|0123456789|Hello", logged)


@pytest.mark.parametrize(
    "entry",
    [
        'name = "a"',
        'key = "short"',
        'hash = "sha256:00"',
        'key = "a-key-of-enough-length"\nrole = "god"',
        'key = "a-key-of-enough-length"\ntenant = "no spaces"',
        'key = "a-key-of-enough-length"\nrequests_per_minute = 0',
        'key = "a-key-of-enough-length"\ntokens_per_minute = 1.5',
        'key = "a-key-of-enough-length"\npriority_cap = 9',
        'key = "a-key-of-enough-length"\nqueue_share = 0',
        'key = "a-key-of-enough-length"\nqueue_share = true',
        'key = "a-key-of-enough-length"\nrpm = 3',
        'key = "a-key-of-enough-length"\n[[keys]]\nkey = "a-key-of-enough-length"',
        'key = "a-key-of-enough-length',
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(tmp_path, entry):
    path = tmp_path / "keys.toml"
    path.write_text(f"[[keys]]\n{entry}\n")
    with pytest.raises(ConfigError, match="--api-keys") as refusal:
        KeySource(str(path)).load()
    assert "enough" not in str(refusal.value)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="No such file"):
        read_keys("/nowhere/keys.toml")


def test_keys_come_from_the_environment_too(monkeypatch):
    from pagedjax.cli import _key_source

    monkeypatch.setenv("PAGEDJAX_API_KEY", USER)
    monkeypatch.setenv("PAGEDJAX_ADMIN_API_KEY", ADMIN)
    found = _key_source(None).load()
    assert [(key.role, keys.find(found, secret) is key) for key, secret in zip(found, (USER, ADMIN))] == [
        ("user", True),
        ("admin", True),
    ]


@pytest.mark.parametrize("secret", ["", "short"])
def test_a_key_in_the_environment_that_is_none_opens_no_server(monkeypatch, secret):
    from pagedjax.cli import _key_source

    monkeypatch.setenv("PAGEDJAX_API_KEY", secret)
    with pytest.raises(ConfigError, match=f"PAGEDJAX_API_KEY has {len(secret)} characters; .* unset it, or make one"):
        _key_source(None).load()


def test_a_new_key_fits_the_entry_that_is_printed_with_it(tmp_path, capsys):
    assert run(["keys", "alice", "--tenant", "gold"]) == 0
    printed = capsys.readouterr()
    (key,) = re.findall(r"pj-\S+", printed.err)
    assert key not in printed.out
    path = tmp_path / "keys.toml"
    path.write_text(printed.out)
    (found,) = read_keys(str(path))
    assert keys.find([found], key) is found
    assert (found.name, found.tenant, found.role) == ("alice", "gold", "user")


def test_a_limit_without_room_says_how_long_to_wait():
    now = [0.0]
    limits, key = Limits(lambda: now[0]), ApiKey(name="a", digest=b"a", tokens_per_minute=60)
    limits.charge_output(key, 90)
    with pytest.raises(RequestError, match="31 s"):
        limits.take_request(key)
    now[0] = 31.0
    limits.take_request(key)
