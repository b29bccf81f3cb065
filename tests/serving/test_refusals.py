"""Whatever is wrong with a request has its status, OpenAI's error body and the field's name; nothing is a 500."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat

from pagedjax.core.errors import RequestError
from pagedjax.core.request import SamplingParams
from serving import embedding
from serving.requests import fields, request_fields, response_call
from serving.requests.inputs import MAX_PROMPTS, ModelFacts
from serving.requests.schemas import parse_chat, parse_completion

MODEL = ModelFacts("tiny", 258, 200)
ROOT = Path(__file__).parent.parent.parent
# The documentation speaks of them as of "others".
NAMING_WHAT_IS_DONE_ANYWAY = {
    *("modalities", "reasoning_effort", "verbosity", "prompt_cache_retention", "functions", "function_call"),
}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"use_beam_search": True, "n": 2, "best_of": 4}, "best_of"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "n": 2, "top_p": 0.7}, "top_p"),
        ({"use_beam_search": True, "n": 2, "presence_penalty": 1}, "presence_penalty"),
        ({"use_beam_search": True, "preemptible": False}, "preemptible"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "never"}, "early_stopping"),
        ({"preemptible": 0}, "preemptible"),
        ({"priority": -9}, "priority"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 1.5}, "best_of"),
        ({"best_of": 128, "prompt": ["a"] * 9}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 128, "prompt": ["a"] * 9}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": [1]}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"stop_token_ids": [3, "a"]}, "stop_token_ids[1]"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"65": 101}}, "logit_bias"),
        ({"logit_bias": [65]}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": -3}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"chunks": 1}}, "stream_options.chunks"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"priority": 8}, "priority"),
        ({"user": 5}, "user"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1, 258]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1] * 200}, "prompt"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_completions_refuse(client, engine, fields, param):
    answer = client.complete(**fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not engine.submitted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "a": 1}}, "response_format.a"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"prediction": {}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"store": True}, "store"),
        ({"store": 0}, "store"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"enable_thinking": {}}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": "a" * 257}}, "chat_template_kwargs.enable_thinking"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "messages": [{"role": "user", "content": " "}]},
            "continue_final_message",
        ),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": ""}] * 201}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "a", "mood": "b"}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_chat_refuses(client, engine, fields, param):
    answer = client.chat(**fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not engine.submitted


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x" * 10_000,
        b"{",
        b'{"model": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b"null",
        b"[]",
        b'"text"',
        b"[" * 500 + b"]" * 500,
    ],
)
def test_a_body_that_is_no_json_object_is_400(client, path, body):
    answer = client.request("POST", path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("ask", "params"),
    [("complete", openai_completion.CompletionCreateParamsBase), ("chat", openai_chat.CompletionCreateParamsBase)],
)
def test_no_field_of_openai_s_is_passed_over_in_silence(client, ask, params):
    for name in {*params.__annotations__, "stream"}:
        answer = getattr(client, ask)(**{name: {"nonsense": [1]}})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"].startswith(name)


NO_EFFECT = {
    "user": "a",
    "safety_identifier": "a",
    "metadata": {"a": "b"},
    "prompt_cache_key": "a",
    "store": False,
    "service_tier": "auto",
    "tools": [],
    "parallel_tool_calls": True,
}


@pytest.mark.parametrize("name", NO_EFFECT)
def test_fields_without_effect_are_taken_on_the_routes_whose_schema_at_openai_has_them(client, name):
    asks = {"complete": openai_completion.CompletionCreateParamsBase, "chat": openai_chat.CompletionCreateParamsBase}
    for ask, params in asks.items():
        answer = getattr(client, ask)(**{name: NO_EFFECT[name]})
        assert answer.status_code == (200 if name in params.__annotations__ else 400)
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "unknown_parameter"
    response = client.post("/v1/responses", {"model": "tiny", "input": "a", name: NO_EFFECT[name]})
    assert response.status_code == 200


def test_a_response_format_of_text_is_taken_on_completions_too(client):
    for ask in (client.complete, client.chat):
        assert ask(response_format={"type": "text"}).status_code == 200


TABLES = request_fields.COMPLETION, request_fields.CHAT, embedding.FIELDS, response_call.FIELDS


@pytest.mark.parametrize("table", TABLES)
def test_every_field_that_is_taken_is_documented(table):
    documented = set(re.findall(r"`(\w+)", (ROOT / "docs" / "serving.md").read_text()))
    taken = {name for name, check in table.items() if check is not fields.refused}
    assert taken - documented - {"model", "prompt", "messages", "input"} == NAMING_WHAT_IS_DONE_ANYWAY & taken


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            f'"seed": {2**100}',
            f"seed must be an integer from -9223372036854775808 to 18446744073709551615, not {2**100}",
        ),
        (f'"n": {2**100}', f"n must be an integer from 1 to 128, not {2**100}"),
        (f'"stop_token_ids": [3, {2**100}]', f"stop_token_ids holds token id {2**100}; the vocabulary has ids 0..257"),
        (f'"stop_token_ids": [-{2**100}]', f"stop_token_ids holds token id -{2**100}; the vocabulary has ids 0..257"),
        ('"seed": 1.5', "seed must be an integer, not a number"),
        ('"stop_token_ids": [3, "a"]', "stop_token_ids[1] must be an integer, not a string"),
        ('"stop": 3', "stop must be a string or an array of strings, not an integer"),
        ('"stop": [1]', "stop[0] must be a string, not an integer"),
        ('"n": 2, "best_of": 1', "best_of must be at least n, which is 2, not 1"),
        ('"best_of": 0', "best_of must be an integer from 1 to 128, not 0"),
    ],
)
def test_a_refusal_says_what_would_be_taken(client, fields, message):
    answer = client.request("POST", "/v1/completions", content=f'{{"model": "tiny", "prompt": "a", {fields}}}')
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("role", [{}, {"role": None}])
def test_a_message_without_a_role_is_told_that_it_is_missing(client, role):
    error = client.chat(messages=[{"content": "a", **role}]).json()["error"]
    assert (error["message"], error["code"]) == ("messages[0].role is required", "missing_required_parameter")


@pytest.mark.parametrize(
    ("path", "fields", "param", "shown"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "prompt", "messages"),
        ("/v1/responses", {"input": "a"}, "prompt", "input"),
        ("/v1/responses", {"input": "a"}, "max_tokens", "max_output_tokens"),
        ("/v1/completions", {"prompt": "a"}, "max_tokens", "max_tokens"),
    ],
)
def test_what_is_too_large_for_the_engine_is_named_as_the_route_names_it(
    client_of, FakeEngine, path, fields, param, shown
):
    client = client_of(FakeEngine(refuse=RequestError("no", param=param, code="prompt_exceeds_kv_cache")))
    assert client.post(path, {"model": "tiny", **fields}).json()["error"]["param"] == shown


def test_another_model_is_404(client):
    answer = client.complete(model="gpt-4")
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "the model 'gpt-4' does not exist; this server has 'tiny'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("queue_full", 429, "rate_limit_error"),
        ("draining", 503, "server_error"),
        ("context_length_exceeded", 400, "invalid_request_error"),
        ("prompt_exceeds_kv_cache", 400, "invalid_request_error"),
    ],
)
def test_the_engine_s_refusals_keep_their_code(client_of, FakeEngine, code, status, kind):
    answer = client_of(FakeEngine(refuse=RequestError("no", code=code))).chat()
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["type"]) == (status, code, kind)
    assert ("retry-after" in answer.headers) == (status in (429, 503))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = [
    *("prompt", "messages", "n", "stop", "logit_bias", "logprobs", "stream", "stream_options", "echo", "best_of"),
    *("max_tokens", "min_tokens", "temperature", "top_p", "seed", "stop_token_ids", "prompt_logprobs", "metadata"),
    *("tools", "tool_choice", "response_format", "top_logprobs", "max_completion_tokens", "priority", "user"),
]
BODIES = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5)
MESSAGES = st.lists(st.fixed_dictionaries({}, optional={"role": JSON, "content": JSON, "name": JSON}), max_size=3)


@settings(max_examples=300, deadline=None)
@given(JSON | BODIES.map(lambda body: {"model": "tiny", "prompt": "a", **body}))
@example({"model": "tiny", "prompt": "a", "stop": None, "n": 1})
def test_any_json_is_a_completion_call_or_a_named_refusal(body):
    assert isinstance(outcome(parse_completion, body), SamplingParams | RequestError)


@settings(max_examples=300, deadline=None)
@given(JSON | st.tuples(MESSAGES, BODIES).map(lambda parts: {"model": "tiny", "messages": parts[0], **parts[1]}))
def test_any_json_is_a_chat_call_or_a_named_refusal(body):
    assert isinstance(outcome(parse_chat, body), SamplingParams | RequestError)


def outcome(parse, body):
    try:
        return parse(body, MODEL).params
    except RequestError as refusal:
        return refusal


@settings(max_examples=60, deadline=None)
@given(BODIES)
def test_no_json_makes_the_app_fail(client_of, FakeEngine, body):
    client = client_of(FakeEngine())
    for answer in (client.complete(**_finite(body)), client.chat(**_finite(body))):
        assert answer.status_code in (200, 400)


def _finite(value):
    """Without what the test's own client cannot encode."""
    if isinstance(value, dict):
        return {_finite(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return 0.5 if isinstance(value, float) and not abs(value) < 1e300 else value


def test_an_integer_beyond_the_floats_is_refused_by_name():
    with pytest.raises(RequestError) as refusal:
        parse_completion({"model": "tiny", "prompt": "a", "temperature": 10**400}, MODEL)
    assert refusal.value.param == "temperature"
