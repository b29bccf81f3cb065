"""An engine without a model, with the interface of AsyncEngine, and clients for the app over it.

Its tokens are bytes. It answers every prompt with `reply`, one delta a piece, and can be told to fail or to hang.
"""

import asyncio
import contextlib
import json
import threading
import time
from typing import NamedTuple

import httpx
import numpy as np
import openai
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pagedjax.core import scheduler
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import RequestError
from pagedjax.core.events import Arrived, StepDue
from pagedjax.core.request import Logprob, Request, SamplingParams
from pagedjax.engine import logs
from pagedjax.engine.async_engine import AsyncEngine
from pagedjax.engine.load import load_of
from serving.app import create_app
from serving.server import DrainingServer, bind

EOS, BOS, VOCAB_SIZE = 256, 257, 258


class ByteTokenizer:
    vocab_size = VOCAB_SIZE
    special_token_ids = frozenset({EOS, BOS})

    def encode(self, text, add_special_tokens=True, *, max_len=None):
        return list(text.encode())

    def decode(self, ids, skip_special_tokens=True):
        special = "" if skip_special_tokens else "<eos>"
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace") + special * (EOS in ids)

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id):
        return self.token_bytes(token_id).decode("utf-8", "replace")

    chat_template_text = ""

    def apply_chat_template(self, messages, *, add_generation_prompt=True, **kwargs):
        if any(message["role"] == "system" for message in messages[1:]):
            raise RequestError("the system message must come first", param="messages")
        turns = [f"<{message['role']}>{message['content']}" for message in messages]
        extra = [f"[{name}={json.dumps(value)}]" for name, value in kwargs.items()]
        return "".join([*extra, *turns, "<assistant>" * add_generation_prompt])


class FakeDelta:
    def __init__(self, index, text="", token_ids=(), logprobs=None, finish_reason=None, stop_reason=None):
        self.index, self.text, self.token_ids, self.logprobs = index, text, token_ids, logprobs
        self.finish_reason, self.stop_reason = finish_reason, stop_reason


class FakeSubmission(NamedTuple):
    prompt_token_ids: list
    params: SamplingParams
    request_id: str
    priority: int


class FakeStream:
    def __init__(self, engine, prompt, params, request_id):
        self.engine, self.params, self.request_id = engine, params, request_id
        self.prompt_token_ids, self.num_cached_tokens = list(prompt), len(prompt) // 4
        self.prompt_logprobs = None
        self.embedding = np.array([len(prompt), 0, -1], np.float32)
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *(candidates(i, params.prompt_logprobs) for i in prompt[1:])]

    def abort(self, outcome="abort"):
        self.engine.aborted.append(self.request_id)
        self.engine.outcomes.append(outcome)

    async def __aiter__(self):
        for delta in self.deltas():
            if self.engine.fail_after is not None and delta is not None:
                self.engine.fail_after -= 1
                if self.engine.fail_after < 0:
                    raise self.engine.failure
            await asyncio.sleep(0)
            if delta is None:
                await asyncio.Event().wait()
            yield delta

    def deltas(self):
        room = dict.fromkeys(range(self.params.n), self.params.max_tokens or 1000)
        for piece in self.engine.reply:
            for index in [index for index in room if room[index]]:
                token_ids = tuple(piece.encode())[: room[index]]
                room[index] -= len(token_ids)
                yield self.delta(index, token_ids, None if room[index] else "length")
        if self.engine.hang:
            yield None
        for index in [index for index in room if room[index]]:
            yield self.delta(index, (EOS,), "stop")

    def delta(self, index, token_ids, finish_reason):
        text = bytes(i for i in token_ids if i < 256).decode()
        top = self.params.logprobs
        logprobs = None if top is None else tuple(candidates(i, top) for i in token_ids)
        return FakeDelta(index, text, token_ids, logprobs, finish_reason)


def candidates(token_id, top):
    """The token itself at rank 3, so that it is among the alternatives only of those who ask for three."""
    tokenizer, rank = ByteTokenizer(), 3
    found = {token_id: Logprob(-3.0, rank, tokenizer.token_text(token_id))}
    for place in range(1, top + 1):
        if place != rank:
            other = (token_id + place) % 256
            found[other] = Logprob(-float(place), place, tokenizer.token_text(other))
    return found


class FakeEngine:
    model_name, max_model_len, created = "tiny", 200, 1700000000

    def __init__(self, reply=("Hel", "lo, ", "world"), *, hang=False, fail_after=None, failure=None, refuse=None):
        self.reply, self.hang, self.fail_after, self.refuse = reply, hang, fail_after, refuse
        self.failure = failure or RuntimeError("secret detail of a crash")
        self.tokenizer, self.registry = ByteTokenizer(), CollectorRegistry()
        self.submitted, self.aborted, self.tenants, self.salts = [], [], [], []
        self.preemptible, self.outcomes = [], []
        self.step_age, self.num_dumps = 0.0, 0
        self.full = False
        self.alive, self.ready, self.started, self.stopped, self.draining = True, True, False, False, False
        self.start_error, self.loading = None, False
        self.stories, self.step_records, self.profiles = {}, [], []

    async def start(self):
        if self.start_error:
            raise self.start_error
        if self.loading:
            await asyncio.Event().wait()
        self.started = True

    async def stop(self):
        self.stopped = True

    def prepare(
        self,
        prompt,
        params,
        *,
        request_id=None,
        priority=0,
        tenant="default",
        preemptible=True,
        cache_salt="",
        pooling=None,
    ):
        self.tenants.append(tenant)
        self.preemptible.append(preemptible)
        self.salts.append(cache_salt)
        return FakeSubmission(prompt, params, request_id, priority)

    def submit_all(self, requests):
        if self.refuse:
            raise self.refuse
        return [self.submit(*request) for request in requests]

    def submit(self, prompt, params, request_id, priority):
        self.submitted.append((bytes(i for i in prompt if i < 256).decode("utf-8", "replace"), params, priority))
        return FakeStream(self, prompt, params, request_id)

    def state(self):
        """Two sequences of 40 tokens run and one waits, in a pool of 8 blocks."""
        state = scheduler.init(SchedulerConfig(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=256))
        for sequence_id in range(3):
            request = Request(sequence_id, prompt_len=40, max_tokens=8)
            state, _ = scheduler.update(state, Arrived(request, (), now_us=sequence_id))
        return scheduler.update(state, StepDue(now_us=9))[0]

    def load(self):
        return load_of(self.state())

    async def ask(self, question):
        return question(self.state())

    async def lives(self, request_id):
        return self.stories.get(request_id, [])

    async def steps(self, since, limit):
        return [step for step in self.step_records if step.number > since][-limit:]

    async def profile(self, directory, duration_s):
        self.profiles.append((directory, duration_s))

    async def render_metrics(self):
        return generate_latest(self.registry)

    def dump_stacks(self):
        self.num_dumps += 1

    async def set_log_level(self, level):
        logs.set_level(level)

    def is_ready(self):
        return self.ready and not self.draining and not self.full

    def is_full(self):
        return self.full

    def is_alive(self):
        return self.alive

    def step_age_s(self):
        return self.step_age

    def drain(self):
        self.draining = True


class Client:
    """Requests to an app in this thread, one event loop each; bodies come back whole."""

    def __init__(self, app):
        self.app = app

    def request(self, method, path, **options):
        async def go():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(go())

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def post(self, path, body=None, **options):
        return self.request("POST", path, **({"json": body} if body is not None else {}), **options)

    def complete(self, **fields):
        return self.post("/v1/completions", {"model": "tiny", "prompt": "Hi", **fields})

    def chat(self, **fields):
        messages = [{"role": "user", "content": "Hi"}]
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **fields})


def read_events(response):
    """The events of a stream: JSON values, and the text [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [event.removeprefix("data: ") for event in response.text.split("\n\n")]
    assert lines.pop() == ""
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture(name="FakeEngine", scope="session")
def fake_engine_class():
    return FakeEngine


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture(scope="session")
def client_of():
    return lambda engine, **options: Client(create_app(engine, **options))


@pytest.fixture
def client(engine):
    return Client(create_app(engine))


@pytest.fixture
def events():
    return read_events


@pytest.fixture(scope="session")
def serving_of():
    """`with serving_of(engine) as server:` has it served by uvicorn on a free port (`server.url`)."""

    @contextlib.contextmanager
    def serving(engine, drain_timeout_s=5.0, **options):
        listener = bind("127.0.0.1", 0)
        app = create_app(engine, **options)
        server = DrainingServer(app, listener, drain_timeout_s)
        thread = threading.Thread(target=server.serve_until_signal)
        thread.start()
        # Only the fake can be told to stay in its loading.
        service = app.state.service
        wait_for(
            lambda: server.started and (service.readiness() == "ready" or getattr(engine, "loading", False)), 120.0
        )
        try:
            yield server
        finally:
            for _ in range(2):
                server.handle_exit(15, None)
            thread.join(30)
            assert not thread.is_alive()

    return serving


@pytest.fixture
def openai_client(golden_llm, serving_of):
    """OpenAI's client of a server over the real model, and the model's name. At the end no block is held."""
    engine = AsyncEngine(golden_llm.engine.config, lambda config: golden_llm.engine)
    with (
        serving_of(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, engine.model_name
    assert not engine.state().running and not engine.state().pool.counts


@pytest.fixture(name="wait_for", scope="session")
def wait_for_fixture():
    return wait_for


def wait_for(condition, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)
