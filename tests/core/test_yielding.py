"""Preemption by rank: who must yield to somebody in line, when, and for how long nobody may."""

import pytest

from pagedjax.core import tenants as accounts
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Preempt
from pagedjax.core.events import StepDue
from pagedjax.core.phases import Phase
from pagedjax.core.policy import excess_blocks, order_of
from pagedjax.core.tenants import MIN_SAMPLE, WINDOW
from tests.core.flood import Flood, Source
from tests.core.world import World


def full(num_running=2, **limits):
    """As many sequences of ordinary priority as there are slots, a few tokens old. A step takes 2 ms."""
    world = World(**{"max_num_seqs": num_running, "tick_us": 1000, **limits})
    for _ in range(num_running):
        world.arrive(4, max_tokens=40)
    for _ in range(3):
        world.step()
    return world


def reasons(world):
    return [(effect.sequence_id, effect.reason) for effect in world.effects(Preempt)]


# ---- rank


def test_a_request_of_higher_priority_takes_a_slot_at_once():
    world = full()
    urgent = world.arrive(4, priority=-1)
    world.step()
    assert (world.running(), world.waiting()) == ([urgent, 0], [1])
    assert reasons(world) == [(1, "priority")]


def test_it_takes_blocks_too_where_slots_are_free():
    world = World(num_blocks=8)
    for _ in range(2):
        world.arrive(12, max_tokens=8)
        world.step()
    urgent = world.arrive(4, max_tokens=8, priority=-1)
    world.step()
    assert (world.running(), world.waiting()) == ([urgent, 0], [1])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_it_goes_before_a_prompt_that_would_take_all_tokens_of_many_steps(async_scheduling):
    """Slots and blocks are free, tokens are not. Those that only decode do not yield: theirs would be no help."""
    world = World(max_num_batched_tokens=8, max_model_len=256, num_blocks=128, async_scheduling=async_scheduling)
    decoding, prompt = world.arrive(4, max_tokens=80), world.arrive(150, max_tokens=1)
    for _ in range(4):
        step_ahead(world)
    urgent = world.arrive(4, max_tokens=1, priority=-1)
    for _ in range(world.state.config.max_steps_in_flight + 2):
        step_ahead(world)
    assert urgent in world.finished
    assert reasons(world) == [(prompt, "priority")]
    assert {decoding, prompt} <= set(world.running())
    world.run()
    assert world.preempted == [prompt]
    assert world.num_computed < 150 + 4 + 4 + 79 + world.state.config.block_size  # full blocks are computed once


def step_ahead(world):
    """Plan a step, and let the oldest be done once as many as may be are in flight."""
    plan = world.due()
    if plan is None or len(world.state.in_flight) == world.state.config.max_steps_in_flight:
        world.done()


def test_who_has_made_way_does_not_come_back_before_one_that_awaits_its_prefix_for_a_step():
    world = full(3)
    prefix = list(range(8))
    urgent = [world.arrive([*prefix, i], priority=-1) for i in range(3)]
    world.step()
    assert world.running() == urgent[:1]
    world.step()
    assert world.running() == urgent
    assert sorted(world.preempted) == [0, 1, 2]


def test_it_takes_no_more_than_it_needs():
    world = full(4)
    for _ in range(2):
        world.arrive(4, priority=-1)
    world.step()
    assert sorted(world.preempted) == [2, 3]


def test_a_victim_in_flight_yields_when_its_step_is_done_and_is_not_asked_twice():
    world = full(async_scheduling=True)
    world.due()
    urgent = world.arrive(4, priority=-1)
    world.due()
    assert world.sequence(1).phase is Phase.YIELDING and world.preempted == []
    for _ in range(3):  # no step more may be in flight, and asking again changes nothing
        assert world.send(StepDue(world.tick())) == ()
    assert [s.phase for s in world.state.running] == [Phase.RUNNING, Phase.YIELDING]
    world.done()
    assert world.preempted == [1]
    assert urgent in [row.sequence_id for row in world.due().rows]


@pytest.mark.parametrize("priority", [0, 1])
def test_an_equal_or_lower_rank_preempts_nobody(priority):
    world = full()
    world.arrive(4, priority=priority)
    world.run()
    assert world.preempted == []


def test_requests_of_one_rank_are_not_preempted_to_and_fro():
    world = full(4, num_blocks=12)
    for i in range(12):
        world.arrive(4 + i % 5, max_tokens=12, tenant="ab"[i % 2])
    world.run()
    assert {effect.reason for effect in world.effects(Preempt)} <= {"memory"}


def test_nobody_yields_in_vain():
    world = full(num_blocks=8)
    world.arrive(30, priority=-1)  # eight blocks and more: all that there are would be too few beside sequence 0
    shielded = full(num_blocks=8, min_execution_chunk=20)
    shielded.arrive(4, priority=-1)
    for one in (world, shielded):
        before = list(one.preempted)
        one.step()
        assert len(one.preempted) - len(before) in (0, 2)
    assert shielded.preempted == []


def test_the_one_preempted_goes_on_before_those_that_came_after_it():
    world = full()
    world.arrive(4, max_tokens=2, priority=-1)
    later = world.arrive(4)
    world.step()
    assert world.waiting() == [1, later]
    while world.sequence(1) is None:
        world.step()
    assert world.waiting() == [later]


# ---- shields


def test_a_time_slice_shields():
    world = full(time_slice=20)
    urgent = world.arrive(4, priority=-1)
    while world.sequence(urgent) is None:
        world.step()
    started = world.state.now_us
    assert 20_000 <= started - 3_000 <= 26_000
    assert reasons(world) == [(1, "priority")]


def test_a_chunk_shields():
    world = full(min_execution_chunk=10)  # each has computed six tokens
    urgent = world.arrive(4, priority=-1)
    for _ in range(4):
        world.step()
    assert world.sequence(urgent) is None
    world.step()
    assert world.sequence(urgent) is not None


def test_nobody_is_preempted_again_before_it_has_got_beyond_where_it_was():
    world = World(max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=4)
    long = world.arrive(90, max_tokens=4)  # it takes back what it had, so it gets on all the time
    while world.sequence(long) is None or world.sequence(long).num_computed < 12:
        world.step()
    computed = []
    for _ in range(8):
        world.arrive(4, max_tokens=1, priority=-1)
        while world.sequence(long) is not None:
            computed.append(world.sequence(long).num_computed)
            world.step()
        while world.sequence(long) is None:
            world.step()
    tops = [effect.num_lost_tokens for effect in world.effects(Preempt)]
    assert len(tops) > 2 and tops == sorted(set(tops))


@pytest.mark.parametrize("shield", [{"time_slice": 100}, {"min_execution_chunk": 100}], ids=str)
def test_no_shield_holds_against_a_shortage_of_blocks(shield):
    world = World(num_blocks=6, enable_prefix_caching=False, tick_us=10, **shield)
    for _ in range(3):
        world.arrive(4, max_tokens=12)
    world.run()
    assert {effect.reason for effect in world.effects(Preempt)} == {"memory"}


def test_under_a_flood_of_urgent_requests_nobody_is_preempted_twice_within_its_shield():
    config = SchedulerConfig(
        num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64, time_slice=50, min_execution_chunk=16, max_wait_s=2.0
    )
    flood = Flood(config, Source("default"), step_us=5_000)
    resumed, last = {}, {}
    for step in range(3000):
        if step % 7 == 0:
            flood.arrive("default", 64, 16, priority=-(step % 3))
        before, num_preemptions = flood.state, len(flood.preemptions)
        flood.step()
        for s in flood.state.running:
            if not any(s.sequence_id == other.sequence_id for other in before.running):
                resumed[s.sequence_id] = flood.state.now_us
        for effect in flood.preemptions[num_preemptions:]:
            if effect.reason != "memory" and effect.sequence_id in last:
                assert flood.state.now_us - resumed[effect.sequence_id] >= 50_000
                assert effect.num_lost_tokens >= 16
            last[effect.sequence_id] = flood.state.now_us
    assert len(last) > 20


# ---- without preemption


@pytest.mark.parametrize("how", ["globally", "for one request"])
def test_without_preemption_a_request_waits_for_room_for_all_its_tokens_and_is_never_preempted(how):
    world = World(num_blocks=8, enable_preemption=how != "globally")
    first = world.arrive(4, max_tokens=13, preemptible=how == "globally")  # four blocks
    second = world.arrive(4, max_tokens=13, preemptible=how == "globally")
    third = world.arrive(4, max_tokens=13, preemptible=how == "globally")
    world.step()
    assert (world.running(), world.waiting()) == ([first, second], [third])
    world.arrive(4, priority=-8)
    world.run()
    assert world.preempted == []


def test_blocks_reserved_for_one_are_not_taken_by_others():
    world = World(num_blocks=8, max_num_seqs=4, enable_prefix_caching=False)
    kept = world.arrive(4, max_tokens=21, preemptible=False)
    world.arrive(4, max_tokens=20)
    world.arrive(4, max_tokens=20, priority=-1)
    world.run()
    assert world.preempted and kept not in world.preempted


# ---- modes


def test_conservative_admission_waits_for_room_for_the_expected_length():
    aggressive, conservative = (World(num_blocks=12, preemption_mode=mode) for mode in ("aggressive", "conservative"))
    for world in (aggressive, conservative):
        for _ in range(4):
            world.arrive(4, max_tokens=20)  # six blocks each in the end
        world.step()
    assert aggressive.running() == [0, 1, 2, 3]
    assert conservative.running() == [0, 1]


def test_the_expected_length_is_what_nine_of_ten_of_a_tenant_s_outputs_keep_to():
    tenants = accounts.enter(accounts.Tenants(), "a", (), ())
    for length in range(1, 20):
        tenants = accounts.ended(tenants, "a", length)
    assert accounts.expected_output(tenants, "a") == 256
    tenants = accounts.ended(tenants, "a", 1000)
    assert accounts.expected_output(tenants, "a") == 18
    for _ in range(200):
        tenants = accounts.ended(tenants, "a", 7)
    assert accounts.expected_output(tenants, "a") == 7
    assert len(accounts.account(tenants, "a").outputs) == 100


def test_conservative_admission_learns_from_finished_outputs():
    world = World(num_blocks=12, preemption_mode="conservative", stop_every=1)
    for _ in range(20):
        world.arrive(4, max_tokens=20)
    world.run()
    world.stop_every = 0
    for _ in range(4):
        world.arrive(4, max_tokens=20)
    world.step()
    assert len(world.running()) == 4


def test_conservative_preempts_for_priority_only_who_has_waited_a_time_slice():
    world = full(preemption_mode="conservative", time_slice=20)
    for _ in range(12):
        world.step()
    urgent = world.arrive(4, priority=-1)
    arrived = world.state.now_us
    while world.sequence(urgent) is None:
        world.step()
    assert world.state.now_us - arrived >= 20_000


# ---- ageing


def test_who_has_waited_too_long_goes_before_higher_priorities():
    world = full(max_wait_s=0.03)
    old = world.arrive(4, priority=7)
    while world.sequence(old) is None:
        world.arrive(4, max_tokens=40, priority=-8)
        world.step()
    assert (old, "ageing") not in reasons(world)
    assert "ageing" in [reason for _, reason in reasons(world)]


@pytest.mark.parametrize("tenant", ["default", "other"])
def test_a_flood_of_urgent_requests_starves_nobody(tenant):
    """Within max_wait_s and the time that those take who were aged before it, every request has begun."""
    config = SchedulerConfig(
        num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64, time_slice=20, min_execution_chunk=8, max_wait_s=1.0
    )
    flood = Flood(config, Source("default", priority=-8, depth=20))
    for _ in range(50):
        flood.step()
    low = flood.arrive(tenant, 64, 64, priority=7)
    while low not in flood.finished:
        flood.step()
        assert flood.num_steps < 3_000
    assert flood.preemptions


# ---- tenants


WEIGHTS = {"gold": 3, "silver": 2, "bronze": 1}


def flood_config(**changes):
    limits = {"num_blocks": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256, "tenant_weights": WEIGHTS}
    return SchedulerConfig(**{**limits, **changes})


@pytest.mark.parametrize("limits", [{"enable_preemption": False}, {"time_slice": 0}, {"num_blocks": 90}], ids=str)
def test_shares_follow_the_weights_with_preemption_and_without(limits):
    flood = Flood(flood_config(**limits), *map(Source, WEIGHTS))
    while flood.service.total() < 10_000:
        flood.step()
    for _ in range(2):
        before, end = flood.service.copy(), flood.service.total() + WINDOW
        while flood.service.total() < end:
            flood.step()
        got = flood.service - before
        for tenant, weight in WEIGHTS.items():
            assert got[tenant] / got.total() == pytest.approx(weight / 6, rel=0.05)
    assert bool(flood.preemptions) == ("num_blocks" in limits)


def test_a_tenant_far_below_its_share_is_protected_until_it_has_it():
    """Gold's requests are urgent, so bronze would get nothing: only protection lets it in, and no more than its due."""
    flood = Flood(flood_config(fairness_threshold=0.2), Source("gold", priority=-5), Source("bronze"))
    while flood.service.total() < 120_000:
        flood.step()
    share = flood.service["bronze"] / flood.service.total()
    assert 0.8 * 0.25 * 0.9 < share < 0.25
    assert {effect.reason for effect in flood.preemptions} <= {"fairness", "priority"}


def test_under_the_strategy_priority_nobody_is_protected():
    config = flood_config(preemption_strategy="priority")
    flood = Flood(config, Source("gold", priority=-5), Source("bronze"))
    for _ in range(1_000):
        flood.step()
    assert flood.service["bronze"] == 0


@pytest.mark.parametrize("priority", [0, -8])
def test_bronze_s_wait_under_a_flood_of_gold_is_bounded(priority):
    """A tenant that has nothing is owed once MIN_SAMPLE service tokens have gone to others since it got in line. Then
    its head is first in line, and a slot is free no later than when the first of those that run has had its slice and
    its chunk, and the steps in flight are done:

        wait <= steps until MIN_SAMPLE + max(time_slice, steps of a prompt and a chunk) + steps in flight + 1

    A step in which S sequences decode is worth 2 S service tokens. A victim may have to compute its prompt first, of
    which each step does max_num_batched_tokens.
    """
    config = flood_config(time_slice=50, min_execution_chunk=16)
    flood = Flood(config, Source("gold", priority=priority, depth=50), step_us=10_000)
    for _ in range(300):
        flood.step()
    bound = -(-MIN_SAMPLE // (2 * 16)) + max(5, 1 + 16) + config.max_steps_in_flight + 1
    for _ in range(5):
        arrived = flood.num_steps
        bronze = flood.arrive("bronze", 64, 8)
        while not any(s.sequence_id == bronze for s in flood.state.running):
            flood.step()
        assert flood.num_steps - arrived <= bound
        while bronze not in flood.finished:
            flood.step()


def test_a_tenant_that_holds_too_many_blocks_gives_way_first_though_it_ranks_higher():
    world = World(num_blocks=11, max_num_seqs=4, enable_prefix_caching=False)
    big = world.arrive(32, max_tokens=8, tenant="a")  # will want a ninth block for its second token
    also = world.arrive(1, max_tokens=4, tenant="a")
    small = [world.arrive(1, max_tokens=4, tenant="b") for _ in range(2)]
    world.step()
    world.state = world.state._replace(tenants=accounts.charge(world.state.tenants, {"b": 500}))
    assert excess_blocks(world.state.running, order_of(world.state, {})) == {"a": 9 - 6}
    world.step()
    assert world.preempted == [also] and world.running() == [big, *small]


def test_who_must_yield_by_rank_is_chosen_from_those_that_hold_too_much_and_only_for_the_excess():
    world = World(num_blocks=16, max_num_seqs=6, enable_prefix_caching=False)
    greedy = [world.arrive(16, max_tokens=20, tenant="a") for _ in range(3)]
    world.arrive(4, max_tokens=20, tenant="b", priority=1)
    world.step()
    world.arrive(12, max_tokens=4, priority=-1, tenant="b")
    world.step()
    assert world.preempted == [greedy[-1]]
