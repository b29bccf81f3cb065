"""Large requests are read, and large answers rendered, beside the event loop, and never before others' small ones."""

import asyncio
import threading

import httpx
import pytest

from pagedjax.core.errors import RequestError
from serving import workers
from serving.app import create_app
from serving.workers import MAX_INLINE_BYTES, MAX_QUICK_BYTES, Workers

LOOP = threading.main_thread().name
PAGES, MEGABYTE = "a" * MAX_INLINE_BYTES, "b" * 10**6


def thread_name():
    return threading.current_thread().name


@pytest.mark.parametrize(
    ("num_bytes", "lane"), [(MAX_INLINE_BYTES, LOOP), (MAX_QUICK_BYTES, "quick"), (MAX_QUICK_BYTES + 1, "slow")]
)
def test_where_work_is_done_follows_from_its_size(num_bytes, lane):
    assert asyncio.run(Workers().run(num_bytes, thread_name)).startswith(lane)


def test_a_lane_refuses_more_than_it_may_hold_and_takes_more_when_that_is_read(monkeypatch):
    monkeypatch.setattr(workers, "MAX_HELD_BYTES", 2 * len(MEGABYTE))

    async def scenario():
        lanes, gate = Workers(), threading.Event()
        first = asyncio.ensure_future(lanes.read(2 * len(MEGABYTE), gate.wait))
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as refusal:
            await lanes.read(len(MEGABYTE), thread_name)
        others = await lanes.read(len(PAGES), thread_name), await lanes.read(len(PAGES) + 1, thread_name)
        gate.set()
        await first
        return refusal.value.code, *others, await lanes.read(3 * len(MEGABYTE), thread_name)

    code, *lanes = asyncio.run(scenario())
    assert code == "queue_full"
    assert [lane.partition("_")[0] for lane in lanes] == [LOOP, "quick", "slow"]


@pytest.fixture
def seen(engine, monkeypatch):
    """The threads in which the tokenizer's two halves ran."""
    found = []
    for name in ("encode", "apply_chat_template"):
        original = getattr(engine.tokenizer, name)
        monkeypatch.setattr(
            engine.tokenizer, name, lambda *a, original=original, **k: found.append(thread_name()) or original(*a, **k)
        )
    return found


def test_a_long_chat_is_rendered_and_tokenised_beside_the_loop(client, seen):
    assert client.chat(messages=[{"role": "user", "content": PAGES}]).status_code == 200
    assert client.chat().status_code == 200
    assert [name.startswith("quick") for name in seen] == [True, True, False, False]


def test_a_long_body_is_parsed_beside_the_loop(client, monkeypatch):
    found = []
    monkeypatch.setattr("serving.generating.parse_chat", lambda *_: found.append(thread_name()) or 1 / 0)
    assert client.chat(messages=[{"role": "user", "content": ""}] * 5_000).status_code == 500
    assert found[0].startswith("slow")


def test_while_a_huge_text_is_tokenised_others_are_answered(engine, monkeypatch):
    app, begun, gate, encode = create_app(engine), threading.Event(), threading.Event(), engine.tokenizer.encode

    def slow_encode(text, **options):
        if text == MEGABYTE:
            begun.set()
            assert gate.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", slow_encode)

    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            huge = [asyncio.ensure_future(complete(client, MEGABYTE)) for _ in range(3)]
            await asyncio.to_thread(begun.wait, 30)
            others = [await complete(client, "a"), await complete(client, PAGES), await client.get("/health")]
            waiting = not any(task.done() for task in huge)
            gate.set()
            return waiting, [answer.status_code for answer in [*others, *await asyncio.gather(*huge)]]

    assert asyncio.run(scenario()) == (True, [200] * 6)


async def complete(client, prompt):
    return await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1})


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_many_logprobs_is_rendered_beside_the_loop(client, monkeypatch, stream):
    found = []
    from serving.answers import completion_rendering

    original = completion_rendering.completion_logprobs
    monkeypatch.setattr(
        completion_rendering, "completion_logprobs", lambda *a, **k: found.append(thread_name()) or original(*a, **k)
    )
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    for prompt in ("a" * 100, "a"):
        found.clear()
        assert client.complete(prompt=prompt, **fields).status_code == 200
        assert found[0].startswith(LOOP if prompt == "a" else "quick")
