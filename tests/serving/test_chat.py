"""POST /v1/chat/completions, answered whole."""

import pytest

from serving.options import ApiOptions


def test_an_answer_is_an_assistant_message(client):
    body = client.chat().json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


def test_messages_become_a_prompt_by_the_template(client, engine):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": []},
        {"role": "user", "content": "d"},
    ]
    client.chat(messages=messages)
    assert engine.submitted[0][0] == "<system>Be brief.<user>a\nb<assistant>c<user>d<assistant>"


def test_messages_that_the_template_refuses_are_400(client):
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    answer = client.chat(messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the system message must come first"


def test_a_final_message_is_continued_without_an_end(client, engine):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " Once upon "}]
    assert client.chat(messages=messages, continue_final_message=True).status_code == 200
    assert client.chat(messages=messages, add_generation_prompt=False).status_code == 200
    assert [prompt for prompt, *_ in engine.submitted] == [
        "<user>a<assistant> Once upon",
        "<user>a<assistant> Once upon ",
    ]


def test_the_template_gets_what_it_may_be_given(client, engine):
    assert client.chat(chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert engine.submitted[0][0] == "[enable_thinking=false]<user>Hi<assistant>"


def test_a_lenient_server_passes_over_what_it_does_not_know(client_of, engine):
    client = client_of(engine, options=ApiOptions(lenient=True))
    messages = [{"role": "user", "content": "a", "mood": "good"}]
    assert client.chat(frobnicate=1, messages=messages).status_code == 200
    assert client.complete(frobnicate=1).status_code == 200
    assert client.complete(suffix="x").status_code == 400


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
    ],
)
def test_max_completion_tokens_wins_and_the_default_is_the_rest_of_the_context(client, engine, fields, max_tokens):
    client.chat(**fields)
    assert engine.submitted[0][1].max_tokens == max_tokens


def test_logprobs_tell_each_token_its_bytes_and_the_likeliest(client):
    answer = client.chat(logprobs=True, top_logprobs=2, max_tokens=1)
    assert answer.json()["choices"][0]["logprobs"]["content"] == [
        {
            "token": "H",
            "logprob": -3,
            "bytes": [72],
            "top_logprobs": [
                {"token": "I", "logprob": -1, "bytes": [73]},
                {"token": "J", "logprob": -2, "bytes": [74]},
            ],
        }
    ]


def test_logprobs_without_top_logprobs_list_no_alternatives(client):
    content = client.chat(logprobs=True, max_tokens=2).json()["choices"][0]["logprobs"]["content"]
    assert [(token["token"], token["top_logprobs"]) for token in content] == [("H", []), ("e", [])]


def test_prompt_logprobs_belong_to_the_answer(client):
    body = client.chat(prompt_logprobs=0, n=2).json()
    assert body["prompt_logprobs"][:2] == [None, {"117": {"logprob": -3, "rank": 3, "decoded_token": "u"}}]


def test_several_choices_are_numbered(client):
    choices = client.chat(n=3).json()["choices"]
    assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [
        (i, "Hello, world") for i in range(3)
    ]


def test_fields_that_cannot_change_an_answer_are_accepted(client):
    fields = {
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "reasoning_effort": "none",
        "verbosity": "medium",
        "tools": [],
        "tool_choice": "none",
        "stop": None,
    }
    assert client.chat(**fields).json()["choices"] == client.chat().json()["choices"]
