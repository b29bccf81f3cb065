"""The real model in float32 over HTTP, asked by OpenAI's own client: the references, alone and together."""

import asyncio
from dataclasses import dataclass

import openai
import pytest

from pagedjax.engine.async_engine import AsyncEngine
from tests.engine.golden import CASES, TOLERANCE, num_certain_tokens

ALONE = [CASES[5], CASES[7], CASES[10], CASES[15]]


@dataclass
class Answer:
    """What a client has read: the text, and of each token its bytes or text and its log-probability."""

    text: str
    tokens: list[bytes | str]
    logprobs: list[float]
    finish_reason: str


@pytest.fixture
def ask(golden_llm, serving_of):
    """`ask(cases, **fields)` asks for all of them at once and gives an Answer each."""
    engine = AsyncEngine(golden_llm.engine.config, lambda config: golden_llm.engine)
    with serving_of(engine) as server:
        yield lambda cases, **fields: asyncio.run(ask_all(f"{server.url}/v1", engine.model_name, cases, fields))
    assert not engine.state().running and not engine.state().pool.counts


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_alone_gives_the_reference(ask, golden_llm, stream):
    for case in ALONE:
        (answer,) = ask([case], stream=stream)
        assert_agrees(case, answer, golden_llm.get_tokenizer())


@pytest.mark.parametrize(("stream", "chats_as_ids"), [(False, True), (True, False)])
def test_all_at_once_give_the_reference_for_each(ask, golden_llm, stream, chats_as_ids):
    cases = [{**case, "messages": None} for case in CASES] if chats_as_ids else CASES
    for case, answer in zip(cases, ask(cases, stream=stream), strict=True):
        assert_agrees(case, answer, golden_llm.get_tokenizer())


def assert_agrees(case, answer, tokenizer):
    """Equal tokens, and their log-probabilities, up to the reference's first near tie."""
    num_certain = num_certain_tokens(case)
    expected = case["greedy_ids"][:num_certain]
    show = tokenizer.token_bytes if case.get("messages") else tokenizer.token_text
    assert answer.tokens[:num_certain] == [show(token_id) for token_id in expected]
    pairs = zip(answer.logprobs[:num_certain], case["logprobs"][:num_certain], strict=True)
    assert max(abs(ours - theirs) for ours, theirs in pairs) < TOLERANCE
    if num_certain == len(case["margins"]):
        assert (answer.text, answer.finish_reason) == (case["text"], "stop" if expected[-1] == 2 else "length")


async def ask_all(url, model, cases, fields):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        return await asyncio.gather(*(ask_one(client, model, case, fields) for case in cases))


async def ask_one(client, model, case, fields):
    """A chat as messages, any other prompt as token ids."""
    fields = {"model": model, "max_tokens": 48, "temperature": 0, **fields}
    if case.get("messages"):
        found = await client.chat.completions.create(messages=case["messages"], logprobs=True, **fields)
    else:
        found = await client.completions.create(prompt=case["prompt_ids"], logprobs=0, **fields)
    parts = [chunk async for chunk in found] if fields["stream"] else [found]
    choices = [part.choices[0] for part in parts]
    return read_chat(choices) if case.get("messages") else read_completion(choices)


def read_completion(choices):
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens, logprobs = [t for p in parts for t in p.tokens], [x for p in parts for x in p.token_logprobs]
    return Answer("".join(choice.text for choice in choices), tokens, logprobs, choices[-1].finish_reason)


def read_chat(choices):
    said = [choice.message if hasattr(choice, "message") else choice.delta for choice in choices]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    tokens, logprobs = [bytes(entry.bytes) for entry in entries], [entry.logprob for entry in entries]
    return Answer("".join(part.content or "" for part in said), tokens, logprobs, choices[-1].finish_reason)
