"""Tools: how a model is told of them, how its calls are read, and that streams say what whole answers say."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.engine.grammar import Grammars
from serving.app import create_app
from serving.options import ApiOptions
from serving.requests.fields import MAX_DEPTH
from serving.tools import tool_calls, tool_prompt, tools
from serving.tools.tool_calls import Call, whole_calls
from serving.tools.tools import ToolChoice
from tests.serving.conftest import ByteTokenizer, Client, FakeEngine, read_events

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer"}},
            "required": ["place"],
            "$defs": {"place": {"type": "string", "maxLength": 8}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
HERMES = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>\n'
TWO = HERMES + '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
LLAMA = '<|python_tag|>{"name": "weather", "parameters": {"place": "Bonn"}}; {"name": "time", "parameters": {}}'
ARRAY = '[{"name": "weather", "arguments": {"place": "Bonn"}}, {"name": "time"}]'
BOTH = (Call("weather", '{"place": "Bonn"}'), Call("time", "{}"))


CUT = [
    *(TWO, HERMES, LLAMA, ARRAY, "a<tool_call", "<tool_call>x</tool_call>y", TWO + "<tool_call>{}</tool_call>"),
    *(TWO.replace('"arguments"', '"x": "}", "arguments"'), ARRAY + " and {so} on", HERMES.replace("}}", "} < }")),
]


def mangled(text):
    """What a model may make of it: a brace too few, an end too soon."""
    return text.replace("}}", "}")[:-5]


def parsed(tool_format, pieces):
    parser = tool_calls.parser_for([WEATHER, TIME], ToolChoice(), tool_format)
    found = [*(parser.push(piece) for piece in pieces), parser.finish()]
    calls = whole_calls(call for piece in found for call in piece.calls)
    return "".join(piece.content for piece in found), calls


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        ("hermes", "No call <tool", "No call <tool", ()),
        ("hermes", HERMES, "Let me see.\n", BOTH[:1]),
        ("hermes", TWO, "Let me see.\n", BOTH),
        ("hermes", TWO.removesuffix("</tool_call>"), "Let me see.\n", BOTH),
        ("hermes", "<tool_call>oops</tool_call> so", "<tool_call>oops</tool_call> so", ()),
        ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, ()),
        ("hermes", "<tool_call>[]</tool_call>", None, ()),
        ("llama3_json", LLAMA, "", BOTH),
        ("llama3_json", LLAMA.removeprefix("<|python_tag|>"), "", BOTH),
        ("llama3_json", "{no json", None, ()),
        ("llama3_json", "<|python", None, ()),
        ("json", ARRAY, "", BOTH),
        ("json", " Hello {", None, ()),
        ("json", '{"name": "weather", "arguments": 5}', None, ()),
        ("json", "[" * 5000, None, ()),
        ("json", "", "", ()),
        ("hermes", '<tool_call>{"arguments": {"place": "Bonn"}, "name": "weather", "x": 1}</tool_call>', "", BOTH[:1]),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"place": "Bonn"}, "x": {"}": 1}}</tool_call>',
            "",
            BOTH[:1],
        ),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"place": "Bonn"}</tool_call> ok', "ok", BOTH[:1]),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"place": "Bo',
            "",
            (Call("weather", '{"place": "Bo'),),
        ),
        ("hermes", '<tool_call>{"name": "weather", "argu', None, ()),
        (
            "hermes",
            TWO.replace("Bonn", "</tool_call>"),
            "Let me see.\n",
            (Call("weather", '{"place": "</tool_call>"}'), BOTH[1]),
        ),
        ("hermes", HERMES + "And <tool_call>x", "Let me see.\nAnd <tool_call>x", BOTH[:1]),
        ("hermes", TWO.replace("</tool_call>\n<tool_call>", ""), "Let me see.\n", BOTH),
        (
            "json",
            '{"type": "function", "name": "weather", "parameters": {"place": "\\"}"}} so',
            " so",
            (Call("weather", '{"place": "\\"}"}'),),
        ),
        ("json", '{"name": "weather", "arguments": "{}"}', "", (Call("weather", "{}"),)),
        ("json", '[{"name": "time", "arguments": {}}, 5]', ", 5]", BOTH[1:]),
        ("json", '{"name": "time"}', "", BOTH[1:]),
        ("json", '{"temperature": 21}', None, ()),
    ],
)
def test_calls_are_read_and_what_is_no_call_is_content(tool_format, text, content, calls):
    assert parsed(tool_format, [text]) == (text if content is None else content, calls)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*CUT, *map(mangled, CUT)]), st.data())
def test_where_text_is_cut_does_not_show(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    for tool_format in tool_calls.FORMATS:
        assert parsed(tool_format, pieces) == parsed(tool_format, list(text)) == parsed(tool_format, [text])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", "hermes"),
        ("{{ messages }}", "hermes"),
        ("{% if tools %}<tool_call>", "hermes"),
        ("{{ tools }} <|python_tag|>", "llama3_json"),
        ("{{ tools | tojson }}", "json"),
    ],
)
def test_the_form_goes_by_the_template(template, expected):
    assert tool_prompt.format_for(template) == expected


def chat(reply, pieces=3, *, options=ApiOptions(), **fields):  # noqa: B008
    """The whole answer's choice, and a stream's deltas put together again as a client does it."""
    parts = [reply[i : i + pieces] for i in range(0, len(reply), pieces)]
    client = Client(create_app(FakeEngine(parts), options=options))
    asked = {"tools": [WEATHER, TIME], **fields}
    whole = client.chat(**asked).json()["choices"][0]
    content, calls, reason = "", [], None
    for event in read_events(client.chat(stream=True, **asked))[:-1]:
        choice = event["choices"][0]
        reason = choice["finish_reason"]
        content += choice["delta"].get("content", "")
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["id"].startswith("call_") and call["type"] == "function"
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    message = whole["message"]
    assert (content or None) == (message["content"] or None)
    assert calls == [call["function"] for call in message.get("tool_calls", ())]
    assert reason == whole["finish_reason"]
    return content, [(call["name"], json.loads(call["arguments"])) for call in calls], reason


def test_arguments_are_streamed_as_they_are_written():
    client = Client(create_app(FakeEngine(list(HERMES))))
    events = read_events(client.chat(stream=True, tools=[WEATHER]))[:-1]
    pieces = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces[0]["function"] == {"name": "weather", "arguments": "{"}
    assert [piece["function"] for piece in pieces[1:4]] == [{"arguments": letter} for letter in '"pl']
    assert all(piece["index"] == 0 and "id" not in piece for piece in pieces[1:])
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"place": "Bonn"}'


def test_a_call_that_is_cut_off_is_shown_as_far_as_it_came():
    cut = HERMES.index("Bonn") + 2
    whole = Client(create_app(FakeEngine([HERMES]))).chat(tools=[WEATHER], max_tokens=cut).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"place": "Bo'}
    assert whole["finish_reason"] == "length"


def test_an_answer_with_calls_says_so_streamed_and_whole():
    assert chat(TWO) == ("Let me see.\n", [("weather", {"place": "Bonn"}), ("time", {})], "tool_calls")
    assert chat("Just text.") == ("Just text.", [], "stop")


def test_the_parser_can_be_chosen():
    assert chat(LLAMA, options=ApiOptions(tool_call_parser="llama3_json"))[1][1] == ("time", {})


def test_none_reads_no_calls():
    assert chat(HERMES, tool_choice="none") == (HERMES, [], "stop")


def test_a_named_tool_s_arguments_are_the_answer():
    choice = {"type": "function", "function": {"name": "weather"}}
    assert chat('{"place": "Bonn"}', tool_choice=choice) == ("", [("weather", {"place": "Bonn"})], "stop")


def test_required_calls_are_an_array():
    assert chat(ARRAY, tool_choice="required") == ("", [("weather", {"place": "Bonn"}), ("time", {})], "tool_calls")


def prompt_of(**fields):
    engine = FakeEngine()
    answer = Client(create_app(engine)).chat(**fields)
    assert answer.status_code == 200, answer.text
    return engine.submitted[0][0]


def test_a_template_without_tools_gets_them_in_words():
    prompt = prompt_of(tools=[TIME], messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "a"}])
    assert prompt.startswith("<system>S\n\nYou can call functions.")
    assert '{"name": "time", "parameters": {"type": "object", "properties": {}}}' in prompt


def test_a_template_with_tools_gets_them_as_they_are(monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "chat_template_text", "{{ tools }}")
    assert prompt_of(tools=[TIME]) == f"[tools={json.dumps([TIME])}]<user>Hi<assistant>"


@pytest.mark.parametrize(("text", "shown"), [("<tool_call>", True), ("<eos>", False)])
def test_tags_that_are_special_tokens_are_shown_where_there_are_tools(monkeypatch, text, shown):
    whole = ByteTokenizer.token_text
    monkeypatch.setattr(ByteTokenizer, "token_text", lambda self, i: text if i == 257 else whole(self, i))
    engine = FakeEngine()
    client = Client(create_app(engine))
    for fields in ({"tools": [TIME]}, {}):
        assert client.chat(**fields).status_code == 200
    assert [params.skip_special_tokens for _, params, _ in engine.submitted] == [not shown, True]


def test_earlier_calls_and_results_reach_the_template(monkeypatch):
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    prompt = prompt_of(messages=messages)
    assert '<assistant><tool_call>\n{"name": "time", "arguments": {"a": 1}}\n</tool_call>' in prompt
    assert "<user><tool_response>\nnoon\n</tool_response>" in prompt
    monkeypatch.setattr(ByteTokenizer, "chat_template_text", "{{ tools }}")
    assert "<tool>noon" in prompt_of(messages=messages)


def nested(depth):
    return {"properties": nested(depth - 1)} if depth else {"description": "a leaf"}


DEEP = nested(MAX_DEPTH)


def test_a_schema_as_deep_as_is_allowed_comes_back_whole(client):
    for choice in ("auto", "required"):
        tool = {"type": "function", "name": "a", "parameters": nested(MAX_DEPTH - 1)}
        answer = client.post("/v1/responses", {"model": "tiny", "input": "a", "tools": [tool], "tool_choice": choice})
        assert answer.status_code == 200 and answer.json()["tools"] == [tool]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [TIME] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TIME]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [TIME]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TIME]}, "tool_choice.type"),
        (
            {"tool_choice": "required", "tools": [TIME], "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]},
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": json.dumps(DEEP)}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(client, engine, fields, param):
    answer = client.chat(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not engine.submitted


def fitting(wish):
    """Whether a text is what the wish asks for."""
    grammar = Grammars(ByteGrammarTokenizer()).compile(wish)

    def fits(text):
        matcher = grammar.copy()._matcher
        return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()

    return fits


def test_a_required_call_of_a_function_without_parameters_has_no_arguments():
    bare = {"type": "function", "function": {"name": "ab"}}
    for choice, form in [(ToolChoice("required"), '[{"name":"ab","arguments":%s}]'), (ToolChoice("named", "ab"), "%s")]:
        fits = fitting(tools.wish([bare], choice, is_parallel=True))
        assert fits(form % "{}")
        assert not fits(form % '{"x":1}')


@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_required_call_has_the_schema_of_its_tool(is_parallel):
    fits = fitting(tools.wish([WEATHER, TIME], ToolChoice("required"), is_parallel=is_parallel))
    weather = '{"name":"weather","arguments":{"place":"Bonn"}}'
    assert fits(f"[{weather}]")
    assert fits(f"[{weather},{weather}]") == is_parallel
    assert not fits("[]") and not fits('[{"name":"rm","arguments":{}}]')
    assert not fits('[{"name":"weather","arguments":{"place":"Bonn am Rhein"}}]')


class ByteGrammarTokenizer(ByteTokenizer):
    eos_token_ids = frozenset({256})
    bos_token_id = 257


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_openai_s_client_gets_calls_that_fit_the_schema(openai_client, choice):
    client, model = openai_client
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "How is the weather in Bonn?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0.0,
        "max_tokens": 48,
    }
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert call.function.name == "weather" and len(json.loads(call.function.arguments)["place"]) <= 8
    with client.chat.completions.stream(**asked) as stream:
        parts = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments == "".join(parts)
    assert len(parts) > 3
