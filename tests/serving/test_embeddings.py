"""POST /v1/embeddings, /tokenize and /detokenize, and the document that describes all routes."""

import base64
import json

import jsonschema
import numpy as np
import openai
import pytest

from pagedjax.engine.async_engine import AsyncEngine
from serving import embedding
from serving.app import ROUTES
from serving.options import ApiOptions
from serving.requests import fields, request_fields


def embed(client, **options):
    return client.post("/v1/embeddings", {"model": "tiny", "input": "Hi!", **options})


def test_vectors_have_the_length_1_and_count_their_prompts(client):
    body = embed(client, input=["Hi!", "a"]).json()
    assert [entry["index"] for entry in body["data"]] == [0, 1]
    assert body["data"][0]["embedding"] == pytest.approx([3 / 10**0.5, 0, -1 / 10**0.5])
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


def test_base64_says_the_same(client):
    (entry,) = embed(client, encoding_format="base64").json()["data"]
    shown = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    assert shown.tolist() == embed(client).json()["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": [1, 999]}, "input"),
        ({"input": [1] * 200}, "input"),
        ({"dimensions": 4}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"priority": 9}, "priority"),
        ({"stream": True}, "stream"),
    ],
)
def test_what_is_wrong_is_refused_by_name(client, engine, options, param):
    answer = embed(client, **options)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not engine.submitted


def test_openai_s_client_gets_vectors_of_the_real_model(golden_llm, serving_of):
    engine = AsyncEngine(golden_llm.engine.config, lambda config: golden_llm.engine)
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Stock prices fell sharply today."]
    with (
        serving_of(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        found = client.embeddings.create(model=engine.model_name, input=texts, extra_body={"pooling": "mean"})
    cat, also_cat, stocks = (np.array(entry.embedding) for entry in found.data)
    assert cat @ cat == pytest.approx(1, abs=1e-5)
    assert cat @ also_cat > cat @ stocks


def test_tokens_of_a_text_and_back(client):
    body = client.post("/tokenize", {"prompt": "Hé", "return_token_strs": True}).json()
    assert (body["count"], body["tokens"], body["max_model_len"]) == (3, [72, 195, 169], 200)
    assert body["token_strs"][0] == "H"
    assert client.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "Hé"}


def test_tokens_of_a_chat_are_those_that_it_would_have(client, engine):
    messages = [{"role": "user", "content": "Hi"}]
    tokens = client.post("/tokenize", {"messages": messages}).json()["tokens"]
    client.chat()
    assert bytes(tokens).decode() == engine.submitted[0][0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"messages": [], "x": 1}, "x"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_cannot_be_tokenised_is_refused_by_name(client, path, body, param):
    answer = client.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_another_model_is_404(client):
    assert embed(client, model="other").status_code == 404
    assert client.post("/tokenize", {"prompt": "a", "model": "other"}).status_code == 404


def test_a_lenient_server_takes_unknown_fields(client_of, engine):
    client = client_of(engine, options=ApiOptions(lenient=True))
    assert client.post("/tokenize", {"prompt": "a", "x": 1}).status_code == 200
    assert embed(client, x=1).status_code == 200


def test_the_document_has_every_route_and_every_field_that_is_taken(client):
    document = client.get("/openapi.json").json()
    assert {path.path.replace(":path}", "}") for path in ROUTES} == set(document["paths"])
    assert all(operation["summary"] for path in document["paths"].values() for operation in path.values())
    tables = {
        "/v1/completions": request_fields.COMPLETION,
        "/v1/chat/completions": request_fields.CHAT,
        "/v1/embeddings": embedding.FIELDS,
    }
    for path, table in tables.items():
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["properties"]) == {name for name, check in table.items() if check is not fields.refused}


FUNCTION = {"name": "time", "parameters": {"type": "object"}}
ASKED = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "body", "is_right"),
    [
        ("/v1/chat/completions", ASKED, True),
        ("/v1/chat/completions", {"messages": []}, False),
        (
            "/v1/chat/completions",
            {**ASKED, "tools": [{"type": "function", "function": FUNCTION}]},
            True,
        ),
        ("/v1/chat/completions", {**ASKED, "tools": [{"type": "function", **FUNCTION}]}, False),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", **FUNCTION}]}, True),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "function": FUNCTION}]}, False),
        ("/v1/responses", {"input": []}, False),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "frobnicate": 1}, False),
    ],
)
def test_the_document_s_schemas_take_what_the_routes_take(client, path, body, is_right):
    post = client.get("/openapi.json").json()["paths"][path]["post"]
    validator = jsonschema.Draft202012Validator(post["requestBody"]["content"]["application/json"]["schema"])
    assert validator.is_valid({"model": "tiny", **body}) == is_right


def test_the_docs_page_needs_nothing_from_elsewhere(client):
    answer = client.get("/docs")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http" not in answer.text.replace("http-equiv", "")


def test_the_model_card_tells_the_limits(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert card["limits"]["vocab_size"] == 258 and json.dumps(card)
