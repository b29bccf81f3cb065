"""POST /v1/responses: a chat under other names, whole and as events."""

import json

import openai
import pytest
from openai.types.responses import ResponseStreamEvent, response_create_params
from pydantic import BaseModel, TypeAdapter

from pagedjax.core.structure import StructuredOutputsParams
from pagedjax.engine.async_engine import AsyncEngine

TIME = {
    "type": "function",
    "name": "time",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CALL = {"type": "function_call", "call_id": "call_1", "name": "time", "arguments": '{"zone": "CET"}'}
TEXT = 'I look.\n<tool_call>\n{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
TWICE = TEXT + TEXT.removeprefix("I look.")


def ask(client, **fields):
    return client.post("/v1/responses", {"model": "tiny", "input": "Hi", **fields})


def read(response):
    """(name, body) of each event."""
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]


def test_an_answer_is_one_message_of_text(client):
    body = ask(client, instructions="Be brief.", metadata={"a": "b"}).json()
    assert (body["object"], body["status"], body["instructions"]) == ("response", "completed", "Be brief.")
    (message,) = body["output"]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["content"] == [{"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}]
    assert body["usage"]["output_tokens"] == 13
    assert body["id"].startswith("resp-") and message["id"] == body["id"].replace("resp-", "msg_")


def test_input_and_instructions_become_a_chat(client, engine):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "c"},
    ]
    assert ask(client, input=items, instructions="S", max_output_tokens=5, temperature=0.5).status_code == 200
    prompt, params, _ = engine.submitted[0]
    assert prompt == "<system>S<user>a<assistant>b<user>c<assistant>"
    assert (params.max_tokens, params.temperature) == (5, 0.5)


def test_what_is_cut_off_is_incomplete(client):
    body = ask(client, max_output_tokens=3).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 3}, {"include": ["message.output_text.logprobs"]}])
def test_events_add_up_to_the_whole_answer(client, fields):
    events = read(ask(client, stream=True, **fields))
    assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
    assert all(name == body["type"] for name, body in events)
    names = [name for name, _ in events]
    assert names[:4] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    ]
    whole, final = ask(client, **fields).json(), events[-1][1]["response"]
    assert names[-1] == f"response.{whole['status']}"
    deltas = [body for name, body in events if name == "response.output_text.delta"]
    (part,) = final["output"][0]["content"]
    assert "".join(body["delta"] for body in deltas) == part["text"]
    assert [entry for body in deltas for entry in body["logprobs"]] == part["logprobs"]
    for name in ("id", "created_at", "output"):
        assert name in final
    assert part == whole["output"][0]["content"][0]
    assert (final["usage"], final["status"]) == (whole["usage"], whole["status"])


@pytest.mark.parametrize("begun", ["Hel", "I look. <tool_c", TEXT[:40], TEXT[:60]])
def test_a_stream_that_fails_ends_with_the_failed_response(client_of, FakeEngine, begun):
    engine = FakeEngine([begun, "more"], fail_after=1)
    events = [body for _, body in read(ask(client_of(engine), stream=True, tools=[TIME]))]
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    (last,) = [event for event in events if event["type"] in ("response.failed", "response.completed", "error")]
    assert last is events[-1] and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    *whole, broken = last["response"]["output"]
    assert [item["status"] for item in whole] == ["completed"] * len(whole) and broken["status"] == "incomplete"
    own = [event for event in events if event.get("item_id") == broken["id"]]
    assert not [event for event in own if event["type"].endswith(".done")]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole
    written = broken["arguments"] if "arguments" in broken else broken["content"][0]["text"]
    assert written and written == "".join(event["delta"] for event in own if "delta" in event)
    assert begun.endswith(written)
    assert "secret" not in json.dumps(events) and engine.aborted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"input": [{**CALL, "arguments": "[1]"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "parsed": 1}]}, "input[0].parsed"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        (
            {"tools": [TIME], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            "text.format",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_what_is_wrong_is_refused_by_name(client, engine, fields, param):
    answer = ask(client, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not engine.submitted


def test_no_field_of_openai_s_is_passed_over_in_silence(client):
    for name in {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}:
        answer = ask(client, **{name: {"nonsense": [1]}})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"].startswith(name)


def test_a_format_is_structured_output(client, engine):
    ask(client, text={"format": {"type": "json_schema", "name": "x", "schema": {}, "strict": True}})
    assert engine.submitted[0][1].structured_outputs == StructuredOutputsParams(json="{}", param="text.format")


def test_calls_are_items_beside_the_message(client_of, FakeEngine):
    body = ask(client_of(FakeEngine([TWICE])), tools=[TIME]).json()
    message, *calls = body["output"]
    assert message["content"][0]["text"] == "I look.\n"
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", "time", '{"zone": "CET"}')
    ] * 2
    assert len({item["id"] for item in body["output"]}) == 3 and calls[0]["call_id"] != calls[1]["call_id"]
    assert body["tools"] == [TIME] and body["tool_choice"] == "auto"


@pytest.mark.parametrize("text", [TWICE, TEXT, TEXT.removeprefix("I look.\n"), "No call.", ""])
def test_events_of_calls_add_up_to_the_whole_answer(client_of, FakeEngine, text):
    client = client_of(FakeEngine(list(text)))
    events = read(ask(client, tools=[TIME], stream=True))
    whole = ask(client, tools=[TIME]).json()
    assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
    items = events[-1][1]["response"]["output"]
    assert [shown(item) for item in items] == [shown(item) for item in whole["output"]]
    assert [body["item"] for name, body in events if name == "response.output_item.done"] == items
    for number, item in enumerate(items):
        own = [(name, body) for name, body in events if body.get("item_id") == item["id"]]
        assert {body["output_index"] for _, body in own} == {number}
        deltas = "".join(body["delta"] for name, body in own if name.endswith(".delta"))
        assert deltas == (item.get("arguments") or "".join(part["text"] for part in item.get("content", ())))


def shown(item):
    """What does not differ between two answers."""
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_calls_and_their_results_come_back_as_a_chat_knows_them(client, engine):
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I look."},
        {**CALL, "id": "fc_1", "status": "completed"},
        {**CALL, "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "one"}]},
    ]
    assert ask(client, input=items).status_code == 200
    call = '<tool_call>\n{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
    results = "".join(f"<user><tool_response>\n{text}\n</tool_response>" for text in ("noon", "one"))
    assert engine.submitted[0][0] == f"<user>a<assistant>I look.\n{call}\n{call}{results}<assistant>"


def test_openai_s_client_gets_calls_that_fit_the_schema(openai_client):
    client, model = openai_client
    tool = {**TIME, "strict": True, "parameters": {**TIME["parameters"], "required": ["zone"]}}
    tool["parameters"]["properties"] = {"zone": {"type": "string", "maxLength": 6}}
    asked = {"model": model, "input": "What time is it?", "tools": [tool], "tool_choice": "required"}
    asked |= {"temperature": 0.0, "max_output_tokens": 60, "parallel_tool_calls": False}
    (call,) = client.responses.create(**asked).output
    with client.responses.stream(**asked) as stream:
        parts = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert call.type == "function_call" and call.name == "time" and len(json.loads(call.arguments)["zone"]) <= 6
    assert "".join(parts) == streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    items = [{"role": "user", "content": "What time is it?"}, call, result]
    assert client.responses.create(model=model, input=items, max_output_tokens=4).output_text


class Point(BaseModel):
    x: int
    is_far: bool


def test_openai_s_client_is_answered(golden_llm, serving_of):
    engine = AsyncEngine(golden_llm.engine.config, lambda config: golden_llm.engine)
    asked = {"model": engine.model_name, "input": "Where is it?", "temperature": 0.0, "max_output_tokens": 40}
    with (
        serving_of(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked, text_format=Point) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        parsed = client.responses.parse(**asked, text_format=Point)
    assert whole.status == "incomplete" and whole.usage.output_tokens == 40
    assert "".join(texts) == final.output_text == parsed.output_text
    assert isinstance(parsed.output_parsed, Point) and parsed.output_parsed == final.output_parsed
