"""The engine on a thread and in a process of its own: clients and operators cannot tell them apart."""

import asyncio
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.engine.async_engine import AsyncEngine
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.outputs import EngineError
from serving.access.keys import KeySource
from serving.app import create_app
from serving.options import ApiOptions
from serving.server import DrainingServer, bind, serve
from tests.engine.fakes import build_counting, build_tiny, make_engine

ROOT = Path(__file__).parent.parent.parent
LONG = {"model": "counting", "prompt": "abc", "max_tokens": 60, "ignore_eos": True}
ADMIN = {"authorization": "Bearer admin-0123456789"}
KEYS = KeySource(secrets=(("admin", "admin-0123456789"),))


def counting(own_process=True, **options):
    limits = {name: value for name, value in options.items() if name not in ("step_s", "crash_at_plan", "die_at_plan")}
    return AsyncEngine(make_engine(**limits).config, partial(build_counting, **options), own_process=own_process)


@pytest.fixture(scope="module", params=["thread", "process"])
def server(request, serving_of, tmp_path_factory):
    """One for all tests that leave nothing behind; a step takes 20 ms, so that one can go within an answer."""
    options = ApiOptions(profile_dir=str(tmp_path_factory.mktemp("profiles")))
    with serving_of(counting(request.param == "process", step_s=0.02), keys=KEYS, options=options) as server:
        yield server


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, headers=ADMIN, timeout=30) as client:
        yield client


@pytest.fixture
def held_blocks(client):
    return lambda: value(client, 'pagedjax_kv_blocks{state="held",tier="device"}')


def value(client, series):
    """One series of /metrics; labels in alphabetical order."""
    for line in client.get("/metrics").text.splitlines():
        name, _, number = line.rpartition(" ")
        labels = re.findall(r'(\w+)="([^"]*)"', name)
        inside = ",".join(f'{key}="{text}"' for key, text in sorted(labels))
        if name.partition("{")[0] + (f"{{{inside}}}" if labels else "") == series:
            return float(number)
    return 0.0


def running(server):
    return sum(server._service.engine.load().running.values())


def test_openai_s_client_is_answered(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="admin-0123456789", max_retries=0) as client:
        whole = client.completions.create(model="counting", prompt=["abc", "ABC"], max_tokens=5, n=2)
        with client.completions.create(model="counting", prompt="abc", max_tokens=5, stream=True) as stream:
            streamed = "".join(chunk.choices[0].text for chunk in stream)
    assert [choice.text for choice in whole.choices] == ["defgh", "defgh", "DEFGH", "DEFGH"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 20)
    assert streamed == "defgh"


@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        ({"prompt": "abc", "max_tokens": 3, "n": 3, "use_beam_search": True, "temperature": 0}, ["def", "deg", "dfg"]),
        ({"prompt": ["abc", "ABC"], "max_tokens": 5, "n": 2, "best_of": 4}, ["defgh", "defgh", "DEFGH", "DEFGH"]),
        ({"prompt": "abc", "max_tokens": 9, "stop": ["gh"]}, ["def"]),
        ({"prompt": "0123456789 ", "max_tokens": 9}, [""]),
    ],
)
def test_beams_samples_and_stops_are_the_same(client, asked, texts):
    answer = client.post("/v1/completions", json={"model": "counting", **asked})
    assert [choice["text"] for choice in answer.json()["choices"]] == texts


def test_log_probabilities_of_the_output_come_over(client):
    body = {"model": "counting", "prompt": "abc", "max_tokens": 3, "logprobs": 0}
    found = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["d", "e", "f"] and all(number <= 0 for number in found["token_logprobs"])


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        ({"prompt": "a" * 64}, 400, "context_length_exceeded"),
        ({"prompt": "abc", "temperature": 9}, 400, None),
        ({"prompt": ["abc"] * 200, "n": 6}, 400, "prompt_exceeds_queue"),
    ],
)
def test_refusals_have_their_status_and_are_counted(client, asked, status, code):
    answer = client.post("/v1/completions", json={"model": "counting", **asked})
    assert answer.status_code == status and answer.json()["error"]["code"] in (code, None)


def test_a_client_that_goes_in_mid_stream_frees_its_blocks(client, wait_for, held_blocks):
    before = value(client, 'pagedjax_requests_total{outcome="abort"}')
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        next(answer.iter_bytes())
    wait_for(lambda: value(client, 'pagedjax_requests_total{outcome="abort"}') == before + 1)
    wait_for(lambda: held_blocks() == 0)


def test_a_request_whose_time_is_up_is_504_and_frees_its_blocks(client, wait_for, held_blocks):
    before = value(client, 'pagedjax_requests_total{outcome="timeout"}')
    answer = client.post("/v1/completions", json={**LONG, "timeout": 0.3})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    wait_for(lambda: value(client, 'pagedjax_requests_total{outcome="timeout"}') == before + 1)
    wait_for(lambda: held_blocks() == 0)


def test_a_request_is_cancelled_by_its_id(client, held_blocks, wait_for):
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert client.post(f"/admin/abort/{request_id}").status_code == 200
        rest = "".join(lines)
    assert '"cancelled"' in rest
    wait_for(lambda: held_blocks() == 0)


def test_operators_see_the_queue_and_the_state(server, client, wait_for):
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        next(answer.iter_bytes())
        wait_for(lambda: running(server) == 1)
        queue = client.get("/admin/queue").json()
        state = client.get("/debug/state").json()
    assert queue["tenants"] == {"default": {"running": 1, "waiting": 0}}
    assert [sequence["prompt_len"] for sequence in state["running"]] == [3]
    assert state["tiers"][0]["num_blocks"] == 64


def test_the_life_of_a_request_and_the_steps_are_told(client):
    answer = client.post("/v1/completions", json=LONG | {"prompt": ["abc", "abcdefghi"], "max_tokens": 3})
    by_answer, by_header = (
        client.get(f"/debug/requests/{name}").json()["prompts"]
        for name in (answer.json()["id"], answer.headers["x-request-id"])
    )
    assert by_answer == by_header
    assert [(life["prompt_tokens"], life["state"]) for life in by_answer] == [(3, "ended"), (9, "ended")]
    events = [event["event"] for event in by_answer[0]["events"]]
    assert events == ["queued", "admitted", "prefill", "first_token", "last_token", "finished"]
    steps = client.get("/debug/steps").json()["steps"]
    assert [step["number"] for step in steps] == list(range(steps[0]["number"], steps[-1]["number"] + 1))
    since = client.get("/debug/steps", params={"since": steps[-2]["number"]}).json()["steps"]
    assert since == steps[-1:]


def test_the_engine_is_profiled_where_it_runs(client):
    answer = client.post("/admin/profile", json={"seconds": 0.05})
    assert answer.status_code == 200 and list(Path(answer.json()["directory"]).rglob("*.xplane.pb"))


def test_many_at_once_are_kept_apart(client):
    prompts = ["abcdefghijklmnop"[i : i + 3] for i in range(12)]
    body = {"model": "counting", "prompt": prompts, "max_tokens": 5}
    texts = [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]
    assert texts == ["defghijklmnopqrstu"[i : i + 5] for i in range(12)]


def test_the_log_level_reaches_the_engine(client):
    assert client.put("/admin/log-level", json={"level": "warning"}).json() == {"level": "warning"}
    assert client.put("/admin/log-level", json={"level": "info"}).json() == {"level": "info"}


@pytest.fixture(params=[False, True], ids=["thread", "process"])
def own_process(request):
    return request.param


def test_a_full_queue_is_429_and_a_drain_finishes_what_runs(serving_of, wait_for, own_process):
    engine = counting(own_process, step_s=0.02, max_num_seqs=1, max_queued_requests=1)
    with serving_of(engine, drain_timeout_s=300) as server, ThreadPoolExecutor() as others:
        url = f"{server.url}/v1/completions"
        first = others.submit(httpx.post, url, json=LONG, timeout=60)
        wait_for(lambda: engine.load().running)
        second = others.submit(httpx.post, url, json=LONG, timeout=60)
        wait_for(lambda: len(engine.load().waiting))
        third = httpx.post(url, json=LONG, timeout=60)
        ready = httpx.get(f"{server.url}/ready")
        server.handle_exit(15, None)
        statuses = [answer.status_code for answer in (first.result(), second.result(), third)]
    assert statuses == [200, 200, 429] and third.headers["retry-after"]
    assert ready.json() == {"status": "queue full"}


def test_a_step_loop_that_fails_is_500_and_still_shows_its_metrics(serving_of, monkeypatch, own_process):
    monkeypatch.setattr("serving.server.FAILED_GRACE_S", 60.0)
    with serving_of(counting(own_process, die_at_plan=2)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30)
        statuses = [httpx.get(server.url + path).status_code for path in ("/health", "/ready", "/debug/state")]
        shown = httpx.get(f"{server.url}/metrics").text
    assert (answer.status_code, statuses) == (500, [503, 503, 200])
    assert "pagedjax_engine_up 0.0" in shown and "pagedjax_steps_total" in shown


# ---- a process alone -------------------------------------------------------------------------------------------------


def run_server(engine):
    """The server on a thread, the list to which its exit status goes, and the thread."""
    server, statuses = DrainingServer(create_app(engine), bind("127.0.0.1", 0), 5.0), []
    thread = threading.Thread(target=lambda: statuses.append(server.serve_until_signal()))
    thread.start()
    return server, statuses, thread


def test_a_process_that_is_killed_fails_what_is_pending_at_once_and_ends_the_server(wait_for):
    engine = counting(step_s=0.02)
    server, statuses, thread = run_server(engine)
    wait_for(lambda: server.started and server._service.readiness() == "ready")
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30))
    )
    asking.start()
    wait_for(lambda: engine.load().running)
    os.kill(engine._link.process_id, signal.SIGKILL)
    asking.join(30)
    assert server._service.readiness() != "ready" and server._service.health() == "failed"
    thread.join(30)
    assert answers[0].status_code == 500
    assert answers[0].headers["x-request-id"] in answers[0].json()["error"]["message"]
    assert statuses == [1]


def test_a_process_that_crashes_in_a_step_leaves_the_server_s_own_metrics(serving_of, monkeypatch):
    monkeypatch.setattr("serving.server.FAILED_GRACE_S", 60.0)
    with serving_of(counting(crash_at_plan=3)) as server:
        assert httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30).status_code == 500
        shown = httpx.get(f"{server.url}/metrics").text
        again = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30)
    assert "pagedjax_engine_up 0.0" in shown and "pagedjax_http_requests_total" in shown
    assert again.status_code == 503


def test_a_question_that_cannot_be_sent_or_answered_is_the_asker_s_alone():
    async def scenario():
        engine = counting()
        await engine.start()
        for question in (lambda state: 1, unanswerable, raising):
            with pytest.raises((EngineError, pickle.PicklingError, AttributeError)):
                await engine.ask(question)
        found = await engine.ask(num_blocks)
        await engine.stop()
        with pytest.raises(EngineError):
            await engine.ask(num_blocks)
        return found

    assert asyncio.run(scenario()) == 64


def num_blocks(state):
    return state.pool.num_blocks


def unanswerable(state):
    return lambda: state


def raising(state):
    return state.no_such_thing


def test_a_step_that_hangs_is_ended_with_its_process(serving_of, monkeypatch, wait_for):
    monkeypatch.setattr("pagedjax.engine.process_link.STOP_TIMEOUT_S", 0.5)
    engine = counting(step_s=3600)
    with serving_of(engine) as server:
        body = {**LONG, "timeout": 0.3}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 504
        process_id = engine._link.process_id
    wait_for(lambda: not Path(f"/proc/{process_id}").exists())


PARENT = """
import asyncio, sys
from functools import partial
from pagedjax.core.request import SamplingParams
from pagedjax.engine.async_engine import AsyncEngine
from tests.engine.fakes import build_counting, make_engine

async def main():
    engine = AsyncEngine(make_engine().config, partial(build_counting, step_s=float(sys.argv[1])), own_process=True)
    await engine.start()
    stream = engine.submit("abc", SamplingParams(max_tokens=60, ignore_eos=True))
    print(engine._link.process_id, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("step_s", [0.01, 3600])
def test_a_parent_that_is_killed_leaves_no_orphan(wait_for, step_s):
    command = [sys.executable, "-c", PARENT, str(step_s)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        process_id = int(parent.stdout.readline())
        assert Path(f"/proc/{process_id}").exists()
        parent.kill()
    wait_for(lambda: not is_running(process_id))


def is_running(process_id):
    """Whether it is more than a name that nobody has asked for yet."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def fail_to_build(config):
    raise ConfigError("no such model; set MODEL")


def crash_in_building(config):
    os._exit(7)


def test_what_goes_wrong_in_loading_is_told_as_it_is():
    engine = AsyncEngine(make_engine().config, fail_to_build, own_process=True)
    with pytest.raises(ConfigError, match="set MODEL"):
        serve(lambda: engine, port=0)


def test_a_process_that_ends_while_it_loads_ends_the_start():
    engine = AsyncEngine(make_engine().config, crash_in_building, own_process=True)
    with pytest.raises(Exception, match="exit code 7"):
        serve(lambda: engine, port=0)


def test_a_start_that_is_given_up_ends_its_process(wait_for):
    engine = AsyncEngine(make_engine().config, partial(hang_in_building), own_process=True)
    server, statuses, thread = run_server(engine)
    wait_for(lambda: engine._link.process_id)
    server.handle_exit(15, None)
    thread.join(30)
    assert statuses == [143]
    wait_for(lambda: not is_running(engine._link.process_id))


def hang_in_building(config):
    time.sleep(3600)


def test_structured_output_prompt_scores_and_vectors_come_over(serving_of):
    """The tiny model itself: masks, scores of prompts, hidden states. A wrong grammar is refused there."""
    engine = AsyncEngine(EngineConfig(model="tiny"), build_tiny, own_process=True)
    with serving_of(engine) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def complete(**asked):
            body = {"model": "tiny", "prompt": [5, 9, 2, 40], "max_tokens": 12, "seed": 1, "stream": False, **asked}
            return client.post("/v1/completions", json=body)

        shaped = complete(guided_regex="[a-f]{3,9} [0-9]+x", temperature=1.5)
        scored = complete(echo=True, logprobs=1, max_tokens=2)
        wrong = complete(guided_regex="(a")
        vector = client.post("/v1/embeddings", json={"model": "tiny", "input": [5, 9, 2, 40]})
    assert re.match("[a-f]{3,9}( [0-9]*x?)?", shaped.json()["choices"][0]["text"])
    assert len(scored.json()["choices"][0]["logprobs"]["token_logprobs"]) == 6
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "guided_regex")
    assert sum(x * x for x in vector.json()["data"][0]["embedding"]) == pytest.approx(1)
