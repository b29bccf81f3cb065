"""The ways to ask for structured output over HTTP, and what comes of them in the engine."""

import json

import openai
import pytest
from pydantic import BaseModel

from pagedjax.core.structure import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize("ask", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True, "param": "response_format"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            {"json": json.dumps(SCHEMA), "param": "response_format"},
        ),
        ({"guided_json": SCHEMA}, {"json": json.dumps(SCHEMA), "param": "guided_json"}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": json.dumps(SCHEMA), "param": "guided_json"}),
        ({"guided_json": {}, "guided_whitespace_pattern": ""}, {"json": "{}", "whitespace_pattern": ""}),
        ({"guided_regex": "a+"}, {"regex": "a+", "param": "guided_regex"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b"), "param": "guided_choice"}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"', "param": "guided_grammar"}),
        ({"structured_outputs": {"regex": "a", "json": None}}, {"regex": "a"}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ],
)
def test_every_spelling_becomes_one_wish(client, engine, ask, fields, wish):
    assert getattr(client, ask)(**fields).status_code == 200
    found = engine.submitted[0][1].structured_outputs
    assert found == StructuredOutputsParams(**{"param": found.param, **wish})


def test_a_choice_that_is_no_text_is_named_by_its_place(client):
    error = client.complete(guided_choice=["a", ""]).json()["error"]
    assert error["param"] == "guided_choice" and error["message"].endswith("not '' at index 1")


def test_plain_text_is_no_wish(client, engine):
    client.chat(response_format={"type": "text"})
    assert engine.submitted[0][1].structured_outputs is None


class Point(BaseModel):
    x: int
    is_far: bool


def test_openai_s_parse_helper_gets_its_class_and_streams_say_the_same(openai_client):
    client, model = openai_client
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "Where is it?"}],
        "response_format": Point,
        "temperature": 0.0,
        "max_tokens": 60,
    }
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Point)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == parsed
    with pytest.raises(openai.BadRequestError, match="unclosed group") as refusal:
        client.completions.create(model=model, prompt="a", extra_body={"guided_regex": "(a"})
    assert refusal.value.param == "guided_regex"
