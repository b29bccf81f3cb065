"""The app over the engine itself, on a device that counts: what a client does reaches the scheduler, and back."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from pagedjax.core.request import SamplingParams
from pagedjax.engine.async_engine import AsyncEngine
from tests.engine.fakes import make_engine

LONG = {"model": "counting", "prompt": "abc", "max_tokens": 60, "ignore_eos": True}


@pytest.fixture
def engine():
    """Each step takes 50 ms, so that a client can go in the middle of an answer."""
    return make_async_engine(step_s=0.05)


def make_async_engine(step_s=0.0, **options):
    inner = make_engine(**options)
    collect = inner.runner.collect
    inner.runner.collect = lambda handle: time.sleep(step_s) or collect(handle)
    return AsyncEngine(inner.config, lambda config: inner)


def aborts(engine):
    return engine.metrics.registry.get_sample_value("pagedjax_requests_total", {"outcome": "abort"})


def test_openai_s_client_is_answered_by_the_engine(serving_of, engine):
    with (
        serving_of(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.completions.create(model="counting", prompt=["abc", "ABC"], max_tokens=5, n=2)
        with client.completions.create(model="counting", prompt="abc", max_tokens=5, stream=True) as stream:
            streamed = "".join(chunk.choices[0].text for chunk in stream)
    assert [choice.text for choice in whole.choices] == ["defgh", "defgh", "DEFGH", "DEFGH"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 20)
    assert streamed == "defgh"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_beams_come_back_the_best_first(serving_of, engine, path):
    wish = {"model": "counting", "max_tokens": 3, "n": 3, "use_beam_search": True, "temperature": 0}
    asked = {"prompt": "abc"} if path == "completions" else {"messages": [{"role": "user", "content": "abc"}]}
    with serving_of(engine) as server:
        answer = httpx.post(f"{server.url}/v1/{path}", json=wish | asked, timeout=30)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    found = [choice["text"] if path == "completions" else choice["message"]["content"] for choice in choices]
    # The likeliest letter each time, and then one is skipped: of equals, what continues the best goes first.
    assert found == ["def", "deg", "dfg"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert answer.json()["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(("length_penalty", "texts"), [(-3, [" ", ""]), (3, [" ", " abc"])])
def test_the_length_penalty_says_what_a_longer_answer_is_worth(serving_of, engine, length_penalty, texts):
    wish = {"model": "counting", "prompt": "0123456789", "max_tokens": 4, "n": 2, "use_beam_search": True}
    with serving_of(engine) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=wish | {"length_penalty": length_penalty}, timeout=30)
    assert [choice["text"] for choice in answer.json()["choices"]] == texts


@pytest.mark.parametrize("logprobs", [None, 0])
def test_of_the_best_samples_come_back_as_many_as_were_asked_for(serving_of, engine, logprobs):
    wish = {"model": "counting", "prompt": ["abc", "ABC"], "max_tokens": 5, "n": 2, "best_of": 4, "logprobs": logprobs}
    with serving_of(engine) as server:
        body = httpx.post(f"{server.url}/v1/completions", json=wish, timeout=30).json()
    assert [choice["text"] for choice in body["choices"]] == ["defgh", "defgh", "DEFGH", "DEFGH"]
    assert [choice["index"] for choice in body["choices"]] == list(range(4))
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in body["choices"])
    if logprobs is not None:  # each later sequence is less likely on this device
        assert [choice["logprobs"]["token_logprobs"][0] for choice in body["choices"]] == pytest.approx(
            [0, -0.1, -0.4, -0.5]
        )
    assert body["usage"]["completion_tokens"] == 20


def test_a_client_that_goes_in_mid_stream_frees_its_blocks(serving_of, engine, wait_for):
    with serving_of(engine) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as answer:
            next(answer.iter_bytes())
        wait_for(lambda: not engine.state().running and not engine.state().pool.counts)
        assert aborts(engine) == 1


def test_a_client_that_goes_before_its_whole_answer_frees_its_blocks(serving_of, engine, wait_for):
    with serving_of(engine) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=httpx.Timeout(30, read=0.3))
        wait_for(lambda: not engine.state().running and not engine.state().pool.counts)
        assert aborts(engine) == 1


def test_a_drain_finishes_what_runs(serving_of, engine, wait_for):
    answers = []
    with serving_of(engine, drain_timeout_s=300) as server:
        url = f"{server.url}/v1/completions"
        body = {**LONG, "max_tokens": 12}
        running = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=60)))
        running.start()
        wait_for(lambda: engine.state().running)
        server.handle_exit(15, None)
        running.join(60)
    assert [answer.status_code for answer in answers] == [200]
    assert answers[0].json()["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("options", "fields", "status", "code"),
    [
        ({}, {"prompt": "a" * 64}, 400, "context_length_exceeded"),
        ({"num_gpu_blocks_override": 4}, {"prompt": "a" * 30}, 400, "prompt_exceeds_kv_cache"),
        ({"max_queued_requests": 3}, {"n": 4}, 400, "prompt_exceeds_queue"),
        ({"max_queued_requests": 3}, {"prompt": ["a", "b"], "n": 2}, 400, "prompt_exceeds_queue"),
        ({"max_queued_tokens": 8}, {"prompt": ["abc"] * 3}, 400, "prompt_exceeds_queue"),
        ({"max_queued_tokens": 8}, {"n": 3}, 400, "prompt_exceeds_queue"),
        ({"max_queued_requests": 8, "tenant_weights": "gold=7"}, {"n": 2}, 400, "prompt_exceeds_queue"),
    ],
)
def test_refusals_of_the_scheduler_have_their_status(serving_of, options, fields, status, code):
    with serving_of(make_async_engine(**options)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 1, **fields}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("options", "fields", "param"),
    [
        ({"num_gpu_blocks_override": 4}, {"prompt": "a" * 10, "max_tokens": 40}, "max_tokens"),
        ({"num_gpu_blocks_override": 4}, {"prompt": "a" * 30, "max_tokens": 30}, "prompt"),
        ({}, {"prompt": "a" * 10, "max_tokens": 60}, "max_tokens"),
        ({}, {"prompt": "a" * 64, "max_tokens": 1}, "prompt"),
    ],
)
def test_what_the_cache_or_the_context_cannot_hold_is_blamed_on_the_prompt_only_if_it_is_too_long(
    serving_of, options, fields, param
):
    with serving_of(make_async_engine(**options)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={**LONG, **fields}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_can_never_be_queued_is_told_how_much_can(serving_of):
    with serving_of(make_async_engine(max_queued_requests=3)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={**LONG, "prompt": ["a", "b"], "n": 2}, timeout=30)
    error = answer.json()["error"]
    assert error["message"].startswith(
        "You asked for 4 sequences (2 prompts with n=2), and at most 3 of yours may wait"
    )
    assert "--max-queued-requests" in error["message"]
    assert error["param"] == "prompt"


def test_a_full_queue_is_429(serving_of, wait_for):
    engine = make_async_engine(step_s=0.02, max_num_seqs=1, max_queued_requests=1)
    with serving_of(engine) as server, ThreadPoolExecutor() as others:
        url = f"{server.url}/v1/completions"
        first = others.submit(httpx.post, url, json=LONG, timeout=60)
        wait_for(lambda: engine.load().running)  # as admission sees it: until the first step ends it counts as waiting
        second = others.submit(httpx.post, url, json=LONG, timeout=60)
        wait_for(lambda: len(engine.state().waiting))
        third = httpx.post(url, json=LONG, timeout=60)
        ready = httpx.get(f"{server.url}/ready")
    assert [answer.status_code for answer in (first.result(), second.result(), third)] == [200, 200, 429]
    assert third.headers["retry-after"]
    assert (ready.status_code, ready.json()) == (503, {"status": "queue full"})


def test_a_lost_device_is_500_and_the_dead_engine_still_shows_its_metrics(serving_of, engine, monkeypatch):
    monkeypatch.setattr("serving.server.FAILED_GRACE_S", 60.0)
    with serving_of(engine) as server:
        engine._link.engine.runner.die_at_plan = 2
        answer = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30)
        statuses = [httpx.get(server.url + path).status_code for path in ("/health", "/ready", "/metrics")]
    assert (answer.status_code, statuses) == (500, [503, 503, 200])


PROCESS = """
import sys
from pagedjax import cli
from pagedjax.engine.async_engine import AsyncEngine
from tests.engine.fakes import build_counting, make_engine

cli._engine = lambda config, **where: AsyncEngine(make_engine().config, build_counting, **where)
sys.argv = ["pagedjax", "serve", "smollm2-135m", "--port", "0", "--engine-process", sys.argv[1]]
cli.main()
"""


@pytest.mark.parametrize(
    ("own_process", "sent"), [("off", signal.SIGTERM), ("off", signal.SIGINT), ("on", signal.SIGTERM)]
)
def test_the_process_leaves_with_status_0_at_a_signal(own_process, sent):
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", PROCESS, own_process]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().startswith("Ready on http://127.0.0.1:")
            process.send_signal(sent)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_an_idle_engine_brings_its_transfers_to_their_end(wait_for):
    """Nobody asks for anything any more, and the copies of a request that has ended are still on their way."""
    inner = make_engine(num_gpu_blocks_override=12, num_host_blocks=40, preemption_method="swap")
    inner.runner.transfer_polls = 10**9
    engine = AsyncEngine(inner.config, lambda config: inner)

    async def go():
        await engine.start()
        wish = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        streams = [engine.submit([i, 2, 3, 4, 5], wish) for i in range(4)]
        await asyncio.to_thread(wait_for, lambda: inner.state.tiers.transfers)
        for stream in streams:
            stream.abort()
        await asyncio.to_thread(wait_for, lambda: not inner.has_work)
        assert inner.state.tiers.transfers and inner.state.tiers.host.counts
        inner.runner.transfer_polls = 0
        await asyncio.to_thread(wait_for, lambda: not inner.state.tiers.transfers)
        assert not inner.state.tiers.host.counts
        await engine.stop()

    asyncio.run(go())
