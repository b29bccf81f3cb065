"""POST /v1/completions, answered whole."""

import pytest


def test_a_prompt_is_completed(client):
    body = client.complete().json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {"index": 0, "text": "Hello, world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


def test_usage_counts_tokens_and_the_cached_ones(client):
    usage = client.complete(prompt="12345678").json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 13)
    assert usage["total_tokens"] == 21
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_max_tokens_is_16_unless_asked_for(client, engine):
    client.complete()
    client.complete(max_tokens=3)
    assert [params.max_tokens for _, params, _ in engine.submitted] == [16, 3]


def test_the_reason_of_a_cut_answer_is_length(client):
    choice = client.complete(max_tokens=5).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")


@pytest.mark.parametrize(
    ("prompt", "submitted"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_a_prompt_may_be_text_or_ids_one_or_several(client, engine, prompt, submitted):
    assert client.complete(prompt=prompt).status_code == 200
    assert [text for text, _, _ in engine.submitted] == submitted


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client):
    choices = client.complete(prompt=["a", "b", "c"], n=2, echo=True).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["text"][0] for choice in choices] == ["a", "a", "b", "b", "c", "c"]


def test_a_prompt_counts_once_however_many_choices(client):
    usage = client.complete(prompt=["abc", "d"], n=3).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 6 * 13)


def test_logprobs_are_parallel_lists(client):
    logprobs = client.complete(logprobs=2, max_tokens=3).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e", "l"]
    assert logprobs["token_logprobs"] == [-3, -3, -3]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"][0] == {"I": -1, "J": -2, "H": -3}


def test_the_tokens_of_one_character_share_its_offset(client_of, FakeEngine):
    client = client_of(FakeEngine(["né", "🙂!"]))
    choice = client.complete(prompt="é", echo=True, logprobs=0, max_tokens=20).json()["choices"][0]
    offsets = [0, 0, 1, 2, 2, 3, 3, 3, 3, 4]
    assert choice["text"] == "éné🙂!"
    assert choice["logprobs"]["text_offset"] == [*offsets, len("éné🙂!")]


def test_logprobs_0_reports_the_token_alone(client):
    logprobs = client.complete(logprobs=0, max_tokens=1).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"H": -3}]


def test_echo_puts_the_prompt_first_and_scores_it(client):
    choice = client.complete(prompt="ab", echo=True, logprobs=1, max_tokens=2).json()["choices"][0]
    assert choice["text"] == "abHe"
    assert choice["logprobs"]["tokens"] == ["a", "b", "H", "e"]
    assert choice["logprobs"]["token_logprobs"] == [None, -3, -3, -3]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"c": -1, "b": -3}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_echo_of_ids_shows_their_text(client):
    assert client.complete(prompt=[97, 98], echo=True, max_tokens=1).json()["choices"][0]["text"] == "abH"


def test_max_tokens_0_with_echo_only_scores_the_prompt(client):
    body = client.complete(prompt="ab", echo=True, logprobs=1, max_tokens=0).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -3]
    assert body["usage"]["completion_tokens"] == 0


def test_what_the_unshown_token_is_does_not_show_in_the_finish_reason(client_of, FakeEngine):
    """The engine's one token ends the text here."""
    choice = client_of(FakeEngine(reply=())).complete(prompt="ab", echo=True, max_tokens=0).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")


def test_prompt_logprobs_are_listed_by_token_id(client):
    choice = client.complete(prompt="ab", prompt_logprobs=1, max_tokens=1).json()["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -3, "rank": 3, "decoded_token": "b"},
            "99": {"logprob": -1, "rank": 1, "decoded_token": "c"},
        },
    ]


def test_a_logprob_that_json_cannot_hold_is_a_large_negative_number(client, monkeypatch):
    monkeypatch.setattr("serving.answers.logprobs.MIN_LOGPROB", -2.5)
    logprobs = client.complete(logprobs=2, max_tokens=1).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"I": -1, "J": -2, "H": -2.5}]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_nan_and_minus_infinity_are_made_finite(bad):
    from serving.answers.logprobs import MIN_LOGPROB, finite

    assert finite(bad) == MIN_LOGPROB


def test_every_sampling_parameter_reaches_the_engine(client, engine):
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "logit_bias": {"65": 2.5},
        "stop": ["x", "yz"],
        "stop_token_ids": [10],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 2,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
    }
    assert client.complete(**fields, priority=-3).status_code == 200
    _, params, priority = engine.submitted[0]
    changed = {"logit_bias": {65: 2.5}, "stop": ("x", "yz"), "stop_token_ids": (10,)}
    assert {name: getattr(params, name) for name in fields} == fields | changed
    assert priority == -3


def test_null_means_absent(client, engine):
    names = ("n", "temperature", "stop", "logprobs", "seed", "stream", "stream_options", "suffix", "best_of", "echo")
    assert client.complete(**dict.fromkeys(names)).status_code == 200
    assert engine.submitted[0][1].n == 1


def test_fields_that_name_what_is_done_anyway_have_no_effect(client):
    assert client.complete(best_of=1, suffix="", n=1).json()["choices"] == client.complete().json()["choices"]
    assert len(client.complete(best_of=2, n=2).json()["choices"]) == 2


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_goes_with_several_prompts_choices_and_logprobs(client, max_tokens):
    fields = {"prompt": ["ab", "c"], "n": 2, "best_of": 2, "logprobs": 0, "echo": True, "max_tokens": max_tokens}
    choices = client.complete(**fields).json()["choices"]
    assert [choice["text"] for choice in choices] == [text + "He"[:max_tokens] for text in ("ab", "ab", "c", "c")]
    assert all(len(choice["logprobs"]["tokens"]) == len(choice["text"]) for choice in choices)


def test_fields_that_say_who_asks_have_no_effect(client):
    assert client.complete(user="somebody").json()["choices"] == client.complete().json()["choices"]
