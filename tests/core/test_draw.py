"""A State as notebooks show it."""

from xml.etree import ElementTree as ET

import pytest

from pagedjax.core import draw
from pagedjax.core.scheduler import init
from tests.core.world import World, random_world


def drawn(state):
    """The picture, parsed: that fails on a tag that is not closed or an attribute that is not quoted."""
    return ET.fromstring(state._repr_html_())


def titles(state):
    return [cell.findtext("title") for cell in drawn(state).iter("rect")]


def test_every_block_is_a_cell_that_says_where_it_is():
    world = World(num_blocks=6)
    world.arrive([1, 2, 3, 4, 5], max_tokens=1)
    world.step()
    world.arrive([1, 2, 3, 4, 6])
    world.step()
    world.arrive([1, 2, 3, 4, 7])
    world.step()
    held = ["block 0: held, 2 references", "block 1: held, 1 references", "block 2: held, 1 references"]
    assert titles(world.state) == held + [f"block {i}: clean" for i in (3, 4, 5)]


def test_idle_blocks_are_told_from_clean_ones():
    world = World(num_blocks=3)
    world.arrive(5, max_tokens=1)
    world.run()
    assert titles(world.state) == ["block 0: idle, cached", "block 1: clean", "block 2: clean"]


def test_running_and_waiting_sequences_have_a_row_each():
    world = World(max_num_seqs=1)
    world.arrive(5)
    world.step()
    world.arrive(7)
    rows = [["".join(cell.itertext()) for cell in row] for row in drawn(world.state).iter("tr")][1:]
    assert [row[1:] for row in rows] == [["running", "6", "5", "0", "0 1"], ["waiting", "7", "0", "0", ""]]


@pytest.mark.parametrize("seed", range(4))
def test_every_state_of_a_random_run_can_be_drawn(seed):
    world = World(num_blocks=12, async_scheduling=True)
    for i in range(6):
        world.arrive(1 + i * seed, max_tokens=9)
        world.due()
        assert len(titles(world.state)) == 12
        if len(world.state.in_flight) == 2:
            world.done()
    drawn(random_world(seed, num_events=50).state)


def test_text_is_escaped():
    world = World()
    world.arrive(5)
    world.step()
    strange = world.state.running[0]._replace(phase="<script>alert(1)</script>")
    state = world.state._replace(running=(strange,))
    assert "<script>" not in state._repr_html_()
    assert [cell.text for cell in drawn(state).iter("td")][1] == "<script>alert(1)</script>"


def test_a_large_pool_is_cut_and_says_so():
    state = init(World(num_blocks=5000).state.config)
    assert len(titles(state)) == draw.MAX_CELLS
    assert f"and {5000 - draw.MAX_CELLS} blocks more" in state._repr_html_()
