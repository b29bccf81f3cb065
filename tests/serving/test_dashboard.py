"""The page and the picture of the scheduler that it draws."""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pagedjax.core import scheduler
from pagedjax.core.blocks import take
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.events import Arrived, StepDue
from pagedjax.core.plan import Tier
from pagedjax.core.request import Request
from pagedjax.core.tiers import Copy, Parked
from serving.telemetry import dashboard


def test_a_picture_shows_who_runs_who_waits_and_whose_the_blocks_are(engine):
    picture = dashboard.picture(engine.state())
    assert (picture["num_running"], picture["num_waiting"]) == (2, 1)
    assert picture["running"][0] == {
        "id": 0,
        "tenant": "default",
        "priority": 0,
        "phase": "running",
        "prompt_len": 40,
        "max_tokens": 8,
        "num_tokens": 40,
        "num_computed": 0,
        "num_cached": 0,
        "num_blocks": 3,
    }
    assert picture["plan"] == {"num_rows": 2, "num_tokens": 80}
    assert picture["tiers"] == [
        {
            "name": "device",
            "num_blocks": 8,
            "num_held_blocks": 6,
            "num_idle_blocks": 0,
            "num_shown_blocks": 8,
            "cells": [0, 0, 0, 1, 1, 1, dashboard.FREE, dashboard.FREE],
        }
    ]


def test_blocks_of_a_shared_prefix_show_as_shared():
    state = scheduler.init(SchedulerConfig(num_blocks=8, max_num_batched_tokens=256))
    hashes = (b"a" * 32, b"b" * 32)
    for sequence_id in range(2):
        request = Request(sequence_id, prompt_len=33, max_tokens=8)
        state, _ = scheduler.update(state, Arrived(request, hashes, now_us=sequence_id))
        state, _ = scheduler.update(state, StepDue(now_us=sequence_id))
    assert cells_of(state)[:4] == [dashboard.SHARED, dashboard.SHARED, 0, 1]


def test_of_a_large_pool_the_page_shows_what_covers_the_blocks_in_use():
    state = scheduler.init(SchedulerConfig(num_blocks=5000, max_model_len=40_000, max_num_batched_tokens=32_768))
    assert cells_of(state) == [dashboard.FREE] * dashboard.MIN_SHOWN_BLOCKS
    state, _ = scheduler.update(state, Arrived(Request(0, prompt_len=32_000, max_tokens=8), (), now_us=0))
    state, _ = scheduler.update(state, StepDue(now_us=0))
    assert dashboard.picture(state)["tiers"][0]["num_shown_blocks"] == 2048
    assert cells_of(state) == [0] * 1000 + [dashboard.FREE] * 24


def test_tenants_are_shown_with_their_share_and_the_fair_one():
    weights = (("gold", 3), ("bronze", 1))
    state = scheduler.init(SchedulerConfig(num_blocks=64, max_num_seqs=2, tenant_weights=weights))
    for sequence_id, tenant in enumerate(["gold", "bronze", "bronze"]):
        request = Request(sequence_id, prompt_len=40, max_tokens=8, tenant=tenant)
        state, _ = scheduler.update(state, Arrived(request, (), now_us=sequence_id))
    state, _ = scheduler.update(state, StepDue(now_us=9))
    gold, bronze = sorted(dashboard.tenants(state), key=lambda one: -one["weight"])
    assert (gold["name"], gold["share"], gold["fair_share"]) == ("gold", 0.5, 0.75)
    assert (bronze["num_running"], bronze["num_waiting"], bronze["service"]) == (1, 1, 42)


def test_a_copy_on_the_host_shows_whose_it_is():
    state = scheduler.init(SchedulerConfig(num_blocks=8, num_host_blocks=4))
    pool, block_ids = take(state.tiers.host, 2)
    copies = tuple(Copy(Tier.HOST, block_id) for block_id in block_ids)
    parked = state.tiers.parked.set(5, Parked((b"a" * 32, b"b" * 32), 32, copies))
    state = state._replace(tiers=state.tiers._replace(host=pool, parked=parked))
    assert cells_of(state, 1) == [5, 5, dashboard.FREE, dashboard.FREE]


def cells_of(state, tier=0):
    return dashboard.picture(state)["tiers"][tier]["cells"]


def test_many_watchers_cost_one_picture(engine):
    calls, state = [], engine.state()
    engine.state = lambda: calls.append(1) or state
    snapshots = dashboard.Snapshots(engine)

    async def twice():
        return await snapshots.latest(), await snapshots.latest()

    first, second = asyncio.run(twice())
    assert first is second
    assert len(calls) == 1


def test_the_state_is_served_for_the_page(client):
    assert client.get("/debug/state").json()["num_running"] == 2


def test_the_page_needs_nothing_from_elsewhere(client):
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:|#)|@import|url\((?!data:)", answer.text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)


def test_the_page_puts_no_text_into_html(client):
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", client.get("/").text)


def shown_by_the_page(page, answers):
    """What the page's script asks for, shows and hides, given (status, body) by path."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    script = Path(__file__).parent / "page.js"
    given = json.dumps({"page": page, "answers": answers})
    done = subprocess.run(["node", script], input=given, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def answers_of(client, *, may_watch):
    """The app's own answers, for a key that may see the engine's state or for one that may not."""
    found = {path: client.get(path) for path in ("/ready", "/v1/models", "/debug/state", "/debug/steps")}
    answers = {path: (answer.status_code, answer.json()) for path, answer in found.items()}
    closed = (403, {"error": {}})
    watched = ("/debug/state", "/debug/steps", "/metrics")
    return answers | ({"/metrics": (200, {})} if may_watch else dict.fromkeys(watched, closed))


def test_the_page_finds_the_model_where_the_engine_s_state_is_not_shown(client):
    seen = shown_by_the_page(client.get("/").text, answers_of(client, may_watch=False))
    assert (seen["texts"]["model"], seen["texts"]["status"]) == ("tiny", "ready")
    assert not seen["closed"]
    # Refused once, it does not ask again.
    assert [seen["asked"].count(path) for path in ("/ready", "/v1/models", "/debug/state")] == [3, 1, 1]


def test_the_page_draws_the_engine_s_state_for_those_who_may_see_it(client):
    seen = shown_by_the_page(client.get("/").text, answers_of(client, may_watch=True))
    assert (seen["texts"]["model"], seen["texts"]["num_running"]) == ("tiny", "2")
    assert seen["closed"]
    assert seen["asked"].count("/debug/state") == 3


def test_the_page_asks_for_the_model_again_while_it_loads(client):
    loading = dict.fromkeys(("/ready", "/v1/models", "/debug/state", "/debug/steps"), (503, {"status": "loading"}))
    seen = shown_by_the_page(client.get("/").text, loading | {"/metrics": (200, {})})
    assert (seen["texts"]["status"], seen["asked"].count("/v1/models")) == ("loading", 3)
