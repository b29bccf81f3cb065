"""Another configuration or other weights while requests wait, run and are in flight."""

import pytest

from pagedjax.core import tenants as accounts
from pagedjax.core.effects import Preempt
from pagedjax.core.errors import ConfigError
from pagedjax.core.events import TenantChanged
from pagedjax.core.phases import Phase
from tests.core.world import World


@pytest.mark.parametrize("name", ["block_size", "num_blocks", "num_host_blocks", "num_disk_blocks"])
def test_blocks_cannot_change_while_the_engine_runs(name):
    world = World()
    before = world.state
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        world.change(**{name: 2})
    assert world.state is before


def test_with_fewer_slots_the_lowest_ranks_yield():
    world = World(async_scheduling=True)
    for _ in range(4):
        world.arrive(5, max_tokens=9)
    world.due()
    world.change(max_num_seqs=2)
    plan = world.due()
    assert [row.sequence_id for row in plan.rows] == [0, 1]
    assert [s.phase for s in world.state.running[2:]] == [Phase.YIELDING] * 2
    world.done()
    assert [(effect.sequence_id, effect.reason) for effect in world.effects(Preempt)] == [(2, "slots"), (3, "slots")]
    world.run()
    assert len(world.finished) == 4


def test_with_fewer_slots_those_that_must_not_be_preempted_take_turns():
    world = World()
    for _ in range(4):
        world.arrive(5, max_tokens=9, preemptible=False)
    world.step()
    world.change(max_num_seqs=2)
    assert [row.sequence_id for row in world.step().rows] == [0, 1]
    world.run()
    assert not world.preempted and len(world.finished) == 4


def test_with_one_slot_left_one_whose_blocks_are_reserved_goes_before_the_best_ranked():
    world = World(num_blocks=3)
    first, reserved = world.arrive(3, max_tokens=6), world.arrive(3, max_tokens=6, preemptible=False)
    world.step()
    world.change(max_num_seqs=1)
    world.run()
    assert world.preempted == [first]
    assert list(world.finished) == [reserved, first]


def test_with_more_slots_the_next_step_admits_more():
    world = World(max_num_seqs=1)
    for _ in range(3):
        world.arrive(5)
    world.step()
    world.change(max_num_seqs=8)
    world.step()
    assert world.running() == [0, 1, 2]


def test_a_step_more_may_be_in_flight_or_one_less():
    world = World(async_scheduling=True)
    world.arrive(5, max_tokens=20)
    world.due()
    world.due()
    world.change(async_scheduling=False)
    assert world.due() is None
    world.done()
    assert world.due() is None
    world.done()
    assert world.due() is not None and world.due() is None
    world.change(async_scheduling=True)
    assert world.due() is not None


def test_a_prompt_that_no_step_holds_whole_any_more_is_computed_in_chunks_all_the_same():
    world = World(max_num_seqs=1)
    world.arrive(5, max_tokens=2)
    world.step()
    long = world.arrive(60)
    world.change(enable_chunked_prefill=False, max_num_batched_tokens=32, max_model_len=32)
    world.run()
    assert long in world.finished


@pytest.mark.parametrize("enabled", [True, False])
def test_prefix_caching_goes_on_or_off_for_requests_that_come_later(enabled):
    world = World(enable_prefix_caching=not enabled)
    world.arrive(list(range(9)), max_tokens=12)
    world.step()
    world.change(enable_prefix_caching=enabled)
    world.arrive([*range(7), 99, 5], max_tokens=12)
    world.run()
    again = world.arrive([*range(7), 99, 5], max_tokens=12)
    world.step()
    assert world.sequence(again).num_cached == (8 if enabled else 0)


def test_preemption_switched_off_binds_those_admitted_later_only():
    world = World(num_blocks=6, enable_prefix_caching=False)
    for _ in range(3):
        world.arrive(4, max_tokens=12)
    world.step()
    world.change(enable_preemption=False)
    world.run()
    assert world.preempted and len(world.finished) == 3
    for _ in range(3):
        world.arrive(4, max_tokens=12)
    num_preempted = len(world.preempted)
    world.run()
    assert len(world.preempted) == num_preempted


def test_new_weights_count_from_now_on():
    world = World(tenant_weights={"gold": 2})
    world.arrive(8, max_tokens=1, tenant="gold")
    world.run()
    before = accounts.counter(world.state.tenants, "gold")
    world.send(TenantChanged((("gold", 10),), world.tick()))
    assert accounts.counter(world.state.tenants, "gold") == before
    world.arrive(18, max_tokens=1, tenant="gold")
    world.run()
    assert accounts.counter(world.state.tenants, "gold") == before + 2 * accounts.SCALE
    assert world.state.config.queue_share("gold")[0] == world.state.config.max_queued_requests


def test_impossible_weights_are_refused_and_the_old_state_stands():
    world = World()
    with pytest.raises(ConfigError, match="--tenant-weights"):
        world.send(TenantChanged((("gold", 0),), 5))
    assert world.state.config.tenant_weights == ()
