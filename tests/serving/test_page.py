"""The page at / in a real browser: what it draws of the engine, going back in time, the chat, by keyboard alone."""

import asyncio

import pytest

from pagedjax.core import scheduler
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.events import Arrived, StepDone, StepDue
from pagedjax.core.plan import RowResult
from pagedjax.core.request import Request
from pagedjax.engine.step_history import StepHistory
from tests.serving import chromium

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="needs chromium")


class Course:
    """States of a scheduler, one later at each look: two tenants, the lesser of which is preempted and swapped out."""

    def __init__(self):
        config = SchedulerConfig(
            num_blocks=12, num_host_blocks=8, max_num_seqs=4, max_num_batched_tokens=256, block_size=16, time_slice=0,
            min_execution_chunk=0, preemption_method="swap", tenant_weights=(("gold", 3), ("bronze", 1)),
        )  # fmt: skip
        self.now_us, self.history = 0, StepHistory()
        self.state = scheduler.init(config)
        for sequence_id, (tenant, priority) in enumerate([("bronze", 1), ("bronze", 1), ("gold", 0)]):
            request = Request(sequence_id, prompt_len=60, max_tokens=60, priority=priority, tenant=tenant)
            self.send(Arrived(request, (), self.tick()))

    def tick(self):
        self.now_us += 1000
        return self.now_us

    def send(self, event):
        self.state, effects = scheduler.update(self.state, event)
        self.history.see(event, self.state, effects)

    def __call__(self):
        """Two steps, of which a look at the state shows one."""
        for _ in range(2):
            if self.state.in_flight:
                plan = self.state.in_flight[0]
                results = tuple(RowResult(row.sequence_id, int(row.samples), None) for row in plan.rows)
                self.send(StepDone(plan.plan_id, results, self.tick()))
            self.send(StepDue(self.tick()))
        return self.state

    async def steps(self, since, limit):
        return self.history.since(since, limit)


@pytest.fixture
def seen(serving_of, engine):
    """`seen(look)`: what `await look(page)` gives of a page over an engine whose state moves on."""

    def see(look):
        engine.state = Course()
        engine.steps = engine.state.steps

        async def go(url):
            async with chromium.page_at(url) as page:
                await page.wait_for("document.getElementById('status')?.textContent === 'ready'")
                found = await look(page)
                assert page.errors == []
                return found

        with serving_of(engine) as server:
            return asyncio.run(go(server.url))

    return see


def test_it_draws_the_memory_of_each_tier_the_tenants_and_the_steps(seen):
    async def look(page):
        await page.wait_for("document.querySelectorAll('#timeline rect').length >= 3")
        return (
            await page.run("[...document.querySelectorAll('.blocks')].map((grid) => grid.childElementCount)"),
            await page.run("[...document.querySelectorAll('#tenants .name')].map((name) => name.textContent).sort()"),
            await page.run("document.querySelectorAll('.blocks .held').length"),
            await page.run("document.getElementById('step').textContent"),
        )

    grids, tenants, num_held, step = seen(look)
    assert grids == [12, 8]
    assert tenants == ["bronze", "gold"]
    assert num_held >= 8
    assert step.startswith("number ")


def test_every_step_is_drawn_also_those_between_two_looks(seen):
    async def look(page):
        await page.wait_for("steps.length >= 8")
        numbers, looks = await page.run("[steps.map((one) => one.number), moments.length]")
        title = await page.run("document.querySelector('#timeline title').textContent")
        bars = await page.run("document.querySelectorAll('#timeline .took').length")
        return numbers, looks, title, bars

    numbers, num_looks, title, num_bars = seen(look)
    assert numbers == list(range(len(numbers))) and len(numbers) > num_looks
    assert num_bars >= 8
    assert title.startswith("step 0: ") and " rows, " in title and " ms;" in title


def test_time_stands_still_and_goes_back_by_keyboard_and_on_again(seen):
    async def look(page):
        shown = "document.getElementById('step').textContent"
        await page.wait_for("document.querySelectorAll('#timeline rect').length >= 4")
        await page.run("document.getElementById('pause').focus()")
        await page.press(" ", 32)
        await page.wait_for("document.getElementById('pause').textContent === 'Live'")
        paused = await page.run(shown)
        num_moments = await page.run("moments.length")
        await page.wait_for(f"moments.length > {num_moments}")
        still = await page.run(shown)
        await page.run("document.getElementById('when').focus()")
        await page.press("ArrowLeft", 37)
        back = await page.run(shown)
        ago = await page.run("document.getElementById('ago').textContent")
        await page.run("document.getElementById('pause').click()")
        live = await page.wait_for(f"document.getElementById('ago').textContent === 'live' && {shown}")
        return paused, still, back, ago, live

    paused, still, back, ago, live = seen(look)
    assert paused == still
    number = [int(text.split()[1].rstrip(":")) for text in (back, paused, live)]
    assert number == sorted(set(number))
    assert ago.startswith("−")


def test_it_chats_and_stays_within_a_phone_s_width(seen):
    async def look(page):
        await page.look(390, 800, "dark")
        await page.run("document.getElementById('prompt').focus()")
        await page.call("Input.insertText", text="Hi")
        await page.press("Enter", 13)
        said = await page.wait_for("document.querySelector('.assistant:not(.live) .said')?.textContent")
        background = await page.run("getComputedStyle(document.body).backgroundColor")
        return said, await page.run("document.documentElement.scrollWidth"), background

    said, width, background = seen(look)
    assert said == "Hello, world"
    assert width <= 390
    assert background == "rgb(18, 20, 23)"
