"""The engine behind its thread: streams, aborts, failures, draining."""

import asyncio
import threading
import time

import pytest

from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.core.request import SamplingParams
from pagedjax.engine.async_engine import AsyncEngine
from pagedjax.engine.outputs import Delta, EngineError, Update
from pagedjax.engine.stream import Stream, feed_all
from tests.engine.fakes import make_engine

PARAMS = SamplingParams(temperature=0, max_tokens=5)


def with_engine(scenario, **options):
    """Run `scenario(engine)` on a started AsyncEngine over the counting device."""

    async def main():
        inner = make_engine(**options)
        engine = AsyncEngine(inner.config, lambda config: inner)
        await engine.start()
        try:
            return await asyncio.wait_for(scenario(engine), 30)
        finally:
            await engine.stop()

    return asyncio.run(main())


def hold_up(engine) -> threading.Event:
    """The step loop stands still at the next request, until the event is set."""
    inner, busy = engine._link.engine, threading.Event()
    add = inner.add
    inner.add = lambda request: busy.wait(10) and add(request)
    return busy


async def text(stream) -> str:
    return "".join([delta.text async for delta in stream])


def test_streams_of_many_requests_are_kept_apart():
    async def scenario(engine):
        prompts = ["abcdefghijklmnop"[i : i + 3] for i in range(12)]
        return await asyncio.gather(*(text(engine.submit(prompt, PARAMS)) for prompt in prompts))

    assert with_engine(scenario)[:3] == ["defgh", "efghi", "fghij"]


def test_of_the_streams_that_a_step_feeds_those_at_their_first_token_are_woken_first():
    async def scenario():
        woken = []

        async def read(stream):
            async for _ in stream:
                woken.append(stream.request_id)

        submissions = [make_engine().prepare("abc", PARAMS, request_id=name) for name in ("old", "new")]
        streams = [Stream(submission, lambda *_: None) for submission in submissions]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        streams[0].feed(Update("old", Delta(0, "d", (1,))))
        while woken != ["old"]:
            await asyncio.sleep(0)
        last = Delta(0, "e", (2,), finish_reason="length")
        assert feed_all([(stream, Update(stream.request_id, last)) for stream in streams]) == streams[::-1]
        await asyncio.gather(*readers)
        return woken

    assert asyncio.run(scenario()) == ["old", "new", "old"]


def test_an_aborted_stream_ends_without_an_error_and_its_blocks_come_back():
    async def scenario(engine):
        stream = engine.submit("abc", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        first = await anext(stream)
        stream.abort()
        rest = [delta async for delta in stream]
        while engine.state().running:
            await asyncio.sleep(0.001)
        return first.text, rest, len(engine.state().pool.counts)

    assert with_engine(scenario)[::2] == ("d", 0)


def test_refusals_are_raised_at_once_and_others_go_on():
    async def scenario(engine):
        going = engine.submit("abc", PARAMS)
        with pytest.raises(RequestError) as refusal:
            engine.submit("a" * 63, PARAMS)
        return refusal.value.code, await text(going)

    assert with_engine(scenario) == ("context_length_exceeded", "defgh")


def test_of_several_requests_all_are_queued_or_none():
    async def scenario(engine):
        fits, too_long = engine.prepare("abc", PARAMS), engine.prepare("a" * 63, PARAMS)
        with pytest.raises(RequestError):
            engine.submit_all([fits, too_long])
        nothing_ran = engine.metrics.registry.get_sample_value("pagedjax_steps_total") == 0
        streams = engine.submit_all([fits, engine.prepare("ABC", PARAMS)])
        return nothing_ran, await asyncio.gather(*map(text, streams))

    assert with_engine(scenario) == (True, ["defgh", "DEFGH"])


def test_a_failing_step_is_not_noticed():
    async def scenario(engine):
        engine._link.engine.runner.fail_at_plan = 2
        texts = await asyncio.gather(*(text(engine.submit("abc", PARAMS)) for _ in range(3)))
        return texts, engine.is_alive()

    assert with_engine(scenario) == (["defgh"] * 3, True)


def test_a_lost_device_ends_every_stream_with_our_error_and_the_engine_says_so():
    async def scenario(engine):
        engine._link.engine.runner.die_at_plan = 2
        streams = [engine.submit("abc", PARAMS) for _ in range(3)]
        outcomes = await asyncio.gather(*(text(stream) for stream in streams), return_exceptions=True)
        with pytest.raises(EngineError):
            engine.submit("abc", PARAMS)
        return outcomes, engine.is_alive(), engine.is_ready()

    outcomes, alive, ready = with_engine(scenario)
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    assert not alive and not ready


def test_draining_refuses_new_requests_and_finishes_old_ones():
    async def scenario(engine):
        old = engine.submit("abc", PARAMS)
        engine.drain()
        with pytest.raises(RequestError) as refusal:
            engine.submit("abc", PARAMS)
        return refusal.value.code, await text(old), engine.is_ready(), engine.is_alive()

    assert with_engine(scenario) == ("draining", "defgh", False, True)


def test_an_engine_whose_line_is_full_is_alive_but_not_ready():
    """What is on its way to the step loop is in line too, so the line is bounded while a step takes long."""

    async def scenario(engine):
        busy, seen = hold_up(engine), [engine.is_ready()]
        streams = []
        for _ in range(2):
            streams.append(engine.submit("abc", PARAMS))
            seen.append(engine.is_ready())
        with pytest.raises(RequestError) as refusal:
            engine.submit("abc", PARAMS)
        busy.set()
        texts = [await text(stream) for stream in streams]
        return seen, engine.is_alive(), refusal.value.code, texts, engine.is_ready()

    found = with_engine(scenario, max_queued_requests=2)
    assert found == ([True, True, False], True, "queue_full", ["defgh"] * 2, True)


def test_stop_ends_what_still_runs_with_an_error():
    async def main():
        inner = make_engine()
        engine = AsyncEngine(inner.config, lambda config: inner)
        await engine.start()
        stream = engine.submit("abc", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        await engine.stop()
        with pytest.raises(EngineError):
            await text(stream)

    asyncio.run(main())


def test_stop_leaves_a_step_that_hangs_behind(monkeypatch):
    monkeypatch.setattr("pagedjax.engine.link.STOP_TIMEOUT_S", 0.1)
    hang = threading.Event()

    async def main():
        inner = make_engine()
        inner.runner.collect = lambda handle: hang.wait() and handle
        engine = AsyncEngine(inner.config, lambda config: inner)
        await engine.start()
        engine.submit("abc", PARAMS)
        while not inner.state.in_flight:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(engine.stop(), 30)
        hang.set()

    asyncio.run(main())


def test_a_model_that_does_not_load_is_told_to_whoever_starts_it():
    async def main():
        def build(config):
            raise ConfigError("no such model")

        engine = AsyncEngine(make_engine().config, build)
        with pytest.raises(ConfigError):
            await engine.start()
        assert not engine.is_ready() and not engine.is_alive()
        await engine.stop()

    asyncio.run(main())


def test_before_it_is_ready_requests_are_refused():
    async def main():
        engine = AsyncEngine(make_engine().config, lambda config: make_engine())
        with pytest.raises(RequestError) as refusal:
            engine.submit("abc", PARAMS)
        assert refusal.value.code == "not_ready" and engine.is_alive() and not engine.is_ready()

    asyncio.run(main())


def test_the_same_request_id_twice_is_refused():
    async def scenario(engine):
        first = engine.submit("abc", PARAMS, request_id="one")
        with pytest.raises(RequestError):
            engine.submit("abc", PARAMS, request_id="one")
        return await text(first)

    assert with_engine(scenario) == "defgh"


def test_an_aborted_streams_id_is_in_use_until_the_engine_knows():
    async def scenario(engine):
        busy = hold_up(engine)
        old = engine.submit("abc", PARAMS, request_id="one")
        old.abort()
        with pytest.raises(RequestError):
            engine.submit("ABC", PARAMS, request_id="one")
        busy.set()
        while engine._streams:
            await asyncio.sleep(0.001)
        return await text(engine.submit("ABC", PARAMS, request_id="one")), await text(old)

    assert with_engine(scenario) == ("DEFGH", "")


def test_a_step_has_an_age_only_while_there_is_work():
    async def scenario(engine):
        busy = hold_up(engine)
        engine._last_progress_s = time.monotonic() - 1000
        ages = [engine.step_age_s()]
        stream = engine.submit("abc", PARAMS)
        ages.append(engine.step_age_s())
        engine._last_progress_s = time.monotonic() - 1000
        ages.append(engine.step_age_s())
        busy.set()
        answer = await text(stream)
        return [age > 900 for age in [*ages, engine.step_age_s()]], answer

    assert with_engine(scenario) == ([False, False, True, False], "defgh")


def test_an_abort_for_lack_of_time_is_counted_as_such():
    async def scenario(engine):
        runner, gate = engine._link.engine.runner, threading.Semaphore(1)
        collect = runner.collect
        runner.collect = lambda handle: gate.acquire() and collect(handle)
        stream = engine.submit("abc", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        await anext(stream)
        stream.abort("timeout")
        gate.release(60)
        while engine.state().running:
            await asyncio.sleep(0.001)
        return engine.metrics.registry.get_sample_value("pagedjax_requests_total", {"outcome": "timeout"})

    assert with_engine(scenario) == 1
