"""Server-sent events: their shape, their order, and how a stream ends when something goes wrong."""

import pytest

from pagedjax.core.errors import RequestError


def test_completion_chunks_add_up_to_the_text(client, events):
    *chunks, done = events(client.complete(stream=True))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


def test_the_first_chat_chunk_carries_the_role(client, events):
    *chunks, done = events(client.chat(stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    contents = [{"content": piece} for piece in ("Hel", "lo, ", "world")]
    assert deltas == [{"role": "assistant", "content": ""}, *contents, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert done == "[DONE]"


def test_headers_keep_proxies_from_holding_chunks_back(client):
    headers = client.chat(stream=True).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_usage_comes_last_and_every_other_chunk_says_null(client, events, ask):
    *chunks, last, _ = events(getattr(client, ask)(stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 13
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_usage_comes_with_every_chunk_where_that_is_asked(client, events, ask):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = events(getattr(client, ask)(stream=True, n=2, stream_options=options))
    assert last["usage"]["completion_tokens"] == 26
    for i in range(2):
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"][0]["index"] == i]
        assert counts == sorted(counts) and counts[-1] == 13 and len(set(counts)) > 2


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_usage_so_far_comes_for_steps_without_text_too(client_of, FakeEngine, events, ask):
    client = client_of(FakeEngine(["a", "", "b"]))
    counts = []
    for is_continuous in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": is_continuous}
        *chunks, _, _ = events(getattr(client, ask)(stream=True, stream_options=options))
        counts.append([chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks])
    begin = [1] if ask == "chat" else []
    assert counts == [[*begin, 1, 1, 2, 3], [None] * len([*begin, 1, 2, 3])]


def test_each_choice_begins_with_its_role_and_adds_up(client, events):
    *chunks, _ = events(client.chat(stream=True, n=3))
    for i in range(3):
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == i]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "Hello, world"


def test_several_prompts_stream_side_by_side(client, events):
    *chunks, _ = events(client.complete(prompt=["a", "b", "c"], n=2, echo=True, stream=True))
    texts = [""] * 6
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [prompt + "Hello, world" for prompt in "aabbcc"]


def test_streamed_logprobs_equal_the_whole_ones(client_of, FakeEngine, events):
    client = client_of(FakeEngine(["n", "é🙂"]))
    fields = {"prompt": "aé", "echo": True, "logprobs": 2, "max_tokens": 9}
    *chunks, _ = events(client.complete(stream=True, **fields))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    whole = client.complete(**fields).json()["choices"][0]["logprobs"]
    assert {name: [item for part in parts for item in part[name]] for name in whole} == whole


def test_streamed_chat_logprobs_equal_the_whole_ones(client, events):
    fields = {"logprobs": True, "top_logprobs": 2}
    *chunks, _ = events(client.chat(stream=True, **fields))
    parts = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    whole = client.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    assert [token for part in parts for token in part] == whole


def test_max_tokens_0_streams_the_scored_prompt_alone(client, events):
    *chunks, _ = events(client.complete(prompt="ab", echo=True, logprobs=0, max_tokens=0, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "text", ['"quotes" \\ back', "line\nbreak\r\n\u2028", "héllo 👩‍👩‍👧 ไทย", "\N{OBJECT REPLACEMENT CHARACTER}"]
)
def test_any_text_survives_the_framing(client_of, FakeEngine, events, text):
    *chunks, _ = events(client_of(FakeEngine([text, "!"])).complete(stream=True, max_tokens=100))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text + "!"


def test_tokens_without_text_send_no_chunk(client_of, FakeEngine, events):
    *chunks, _ = events(client_of(FakeEngine(["a", "", "b"])).complete(stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]


def test_a_failure_in_mid_stream_is_an_error_event_and_the_end(client_of, FakeEngine, events):
    engine = FakeEngine(fail_after=2)
    answer = client_of(engine).chat(stream=True)
    *chunks, last = events(answer)
    assert answer.status_code == 200
    assert len(chunks) == 3
    assert last["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] in last["error"]["message"]
    assert "secret" not in answer.text
    assert engine.aborted


@pytest.mark.parametrize(("code", "status"), [("queue_full", 429), ("draining", 503), (None, 400)])
def test_a_refusal_before_the_first_token_has_its_own_status(client_of, FakeEngine, code, status):
    engine = FakeEngine(fail_after=0, failure=RequestError("not today", code=code))
    answer = client_of(engine).complete(stream=True)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == "not today"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_500_with_the_request_id(client_of, FakeEngine, stream):
    answer = client_of(FakeEngine(fail_after=0)).complete(stream=stream)
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
    assert "secret" not in answer.text


def test_one_failing_prompt_of_several_aborts_the_others(client_of, FakeEngine):
    engine = FakeEngine(fail_after=4)
    assert client_of(engine).complete(prompt=["a", "b", "c"]).status_code == 500
    assert len(engine.aborted) == 3


def test_a_stream_that_ends_too_early_is_a_failure(client_of, FakeEngine):
    engine = FakeEngine([])
    engine.submit = lambda *args, **options: Silent()
    assert client_of(engine).complete().status_code == 500


class Silent:
    prompt_token_ids, num_cached_tokens = [1], 0

    async def __aiter__(self):
        for delta in ():
            yield delta

    def abort(self):
        pass
