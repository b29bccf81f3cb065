"""Whose share pays for a request: named by a header, if that is trusted."""

from serving.app import create_app
from tests.serving.conftest import Client, FakeEngine

BODY = {"model": "tiny", "prompt": "ab"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}]}


def tenants(headers, **options):
    engine = FakeEngine()
    client = Client(create_app(engine, **options))
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        assert client.request("POST", path, json=body, headers=headers).status_code == 200
    return engine.tenants


def test_the_header_is_nothing_unless_it_is_trusted():
    assert tenants({"X-Tenant": "gold"}) == ["default", "default"]


def test_a_trusted_header_names_the_tenant():
    assert tenants({"X-Tenant": "gold"}, trust_tenant_header=True) == ["gold", "gold"]


def test_a_request_says_whether_it_may_be_interrupted():
    engine = FakeEngine()
    client = Client(create_app(engine))
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        for wish in ({}, {"preemptible": False}):
            assert client.request("POST", path, json=body | wish).status_code == 200
    assert engine.preemptible == [True, False] * 2


def test_a_cache_salt_reaches_the_engine():
    engine = FakeEngine()
    client = Client(create_app(engine))
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        assert client.post(path, body | {"cache_salt": "mine"}).status_code == 200
        assert client.post(path, body | {"cache_salt": ""}).json()["error"]["param"] == "cache_salt"
    assert engine.salts == ["mine", "mine"]


def test_without_a_header_it_is_the_default_tenant():
    assert tenants({}, trust_tenant_header=True) == ["default", "default"]
