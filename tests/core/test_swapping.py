"""Swapping: what a preempted sequence keeps, where, and how it comes back. Blocks hold four tokens here."""

import pytest

from pagedjax.core.effects import Discard, Fetch, Finish, Preempt, RunStep, SwapOut
from pagedjax.core.phases import Phase
from pagedjax.core.plan import Tier
from pagedjax.core.request import FinishReason
from pagedjax.core.tiers import LOWER_TIERS, pool_of
from pagedjax.core.waiting import find
from tests.core.world import World


def crowded(num_blocks=6, num_sequences=3, max_tokens=12, **limits):
    """Sequences that together want more blocks than there are, and swap."""
    limits = {"num_host_blocks": 12, "preemption_method": "swap", "enable_prefix_caching": False} | limits
    world = World(num_blocks=num_blocks, **limits)
    for _ in range(num_sequences):
        world.arrive(4, max_tokens=max_tokens)
    return world


def step_until(world, condition, step=None):
    for _ in range(100):
        if condition():
            return
        (step or world.step)()
    raise AssertionError("it never comes to that")


def ahead(world):
    """Plan as far ahead as is allowed, then let the oldest step be done."""
    return lambda: world.due() if len(world.state.in_flight) < 2 else world.done()


def yielding(**limits):
    world = crowded(async_scheduling=True, **limits)
    world.due()
    while world.due() and world.sequence(2).phase is Phase.RUNNING:
        world.done()
    return world, 2


def swapping_out_with_all_blocks_there():
    """Nobody has taken a block of it yet, and those that wanted to are gone."""
    world, sequence_id = yielding()
    world.done()
    world.abort(0)
    world.abort(1)
    return world, sequence_id


def swapped_with_all_blocks_there():
    world, sequence_id = swapping_out_with_all_blocks_there()
    world.transfer()
    return world, sequence_id


def swapping_out(**limits):
    world = crowded(**limits)
    step_until(world, lambda: world.preempted)
    return world, 2


def swapped(**limits):
    world, sequence_id = swapping_out(**limits)
    while world.state.tiers.transfers:
        world.transfer()
    return world, sequence_id


def next_in_line(**limits):
    """The others are gone, but its blocks had been taken."""
    world, sequence_id = swapped(**limits)
    world.abort(0)
    world.abort(1)
    return world, sequence_id


def fetching(**limits):
    world, sequence_id = next_in_line(**limits)
    world.due()
    return world, sequence_id


def landing(**limits):
    world, sequence_id = fetching(**limits)
    while world.state.tiers.transfers:
        world.transfer()
    return world, sequence_id


def fetching_in_the_way():
    """It came back too soon: the best-ranked sequence wants the blocks that wait for it."""
    world, sequence_id = swapped(num_blocks=7, max_tokens=20)
    world.abort(1)
    step_until(world, lambda: not world.state.pool.num_free and world.sequence(0).num_planned % 4 == 0)
    assert world.sequence(sequence_id).phase is Phase.FETCHING
    return world, sequence_id


def yielding_again():
    """It has been swapped and resumed; two new ones crowd it out a second time."""
    world, sequence_id = landing(async_scheduling=True, max_tokens=16)
    world.arrive(4, max_tokens=12, priority=-1)
    world.arrive(4, max_tokens=12, priority=-1)
    step_until(world, lambda: phase(world, sequence_id) is not Phase.RUNNING, ahead(world))
    assert phase(world, sequence_id) is Phase.YIELDING
    return world, sequence_id


def two_with_shared_copies():
    """Two sequences with one prefix are swapped; the first of them fetches, the second has no room yet."""
    world = World(num_blocks=7, num_host_blocks=12, preemption_method="swap")
    world.arrive(4, max_tokens=24)
    prefix = list(range(50, 58))
    first, second = world.arrive([*prefix, 1], max_tokens=18), world.arrive([*prefix, 2], max_tokens=18)
    step_until(world, lambda: set(world.preempted) == {first, second} and len(world.sequence(0).blocks) == 7)
    while world.state.tiers.transfers:
        world.transfer()
    world.abort(0)
    world.due()
    assert world.sequence(first).phase is Phase.FETCHING
    assert phase(world, second) is Phase.SWAPPED
    return world, first, second


def phase(world, sequence_id):
    return (find(world.state.waiting, sequence_id) or world.sequence(sequence_id)).phase


def used(world, tier):
    pool = pool_of(world.state.tiers, tier)
    return pool.num_blocks - pool.num_free


def assert_all_free(world):
    assert world.state.pool.num_free == world.state.pool.num_blocks
    assert [used(world, tier) for tier in LOWER_TIERS] == [0, 0]
    assert not world.state.tiers.parked and not world.state.tiers.transfers and not world.staged


def test_a_victim_s_blocks_are_gathered_before_anybody_writes_to_them():
    world, _ = swapping_out()
    (effects,) = [effects for _, effects in world.log if any(isinstance(effect, Preempt) for effect in effects)]
    kinds = [type(effect) for effect in effects]
    assert kinds == [SwapOut, Preempt, RunStep]
    assert effects[1] == Preempt(2, 0, "swap", "memory")


def test_a_swapped_sequence_is_not_computed_again():
    world, sequence_id = landing()
    num_tokens = len(world.tokens[sequence_id])
    (row,) = world.due().rows
    assert (row.start, row.length) == (num_tokens - 1, 1)


def test_fetched_blocks_are_scattered_by_the_plan_that_first_contains_the_sequence():
    world, sequence_id = landing()
    (fetch,) = world.effects(Fetch)
    plan = world.due()
    (scatter,) = plan.scatters
    assert scatter.transfer_id == fetch.transfer_id
    assert tuple(block_id for _, block_id in scatter.pairs) == world.sequence(sequence_id).blocks[: len(scatter.pairs)]
    world.done()
    assert not world.due().scatters


def test_others_run_on_while_a_load_takes_its_time():
    world, slow = fetching(max_tokens=14)
    quick = world.arrive(1, max_tokens=3)
    for _ in range(3):
        assert [row.sequence_id for row in world.step().rows] == [quick]
    assert quick in world.finished
    world.run()
    assert len(world.output(slow)) == 14


def test_a_second_preemption_copies_only_what_is_new():
    world, sequence_id = yielding_again()
    first = {block_id for effect in world.effects(SwapOut) for _, block_id in effect.moves}
    num_full_then = world.effects(Fetch)[0].block_ids
    while world.sequence(sequence_id):
        world.done()
    *_, last = world.effects(SwapOut)
    num_computed = world.state.tiers.parked[sequence_id].num_computed
    num_blocks = -(-num_computed // 4)
    assert len(world.state.tiers.parked[sequence_id].copies) == num_blocks
    assert len(last.moves) == num_blocks - len(num_full_then)
    assert len(first) == len(num_full_then)


def test_a_partial_block_that_was_written_since_is_copied_again():
    world = crowded(num_sequences=2, num_blocks=4, max_tokens=11)
    moved = []
    while world.state.running or world.state.waiting.places:
        world.step()
        while world.state.tiers.transfers:
            world.transfer()
        moved = world.effects(SwapOut)
    assert moved
    assert sorted(world.finished.values()) == ["length", "length"]


def test_only_what_is_needed_of_a_victim_is_evicted_and_its_tail_goes_first():
    world = crowded(num_blocks=8, num_sequences=2, max_tokens=25)
    world.arrive(4, max_tokens=1, priority=1)
    step_until(world, lambda: world.preempted)
    (victim,) = world.preempted
    pool, parked = world.state.pool, world.state.tiers.parked[victim]
    there = [name in pool.cached for name in parked.names]
    assert there == sorted(there, reverse=True)
    assert there.count(False) == 1


def test_what_is_still_there_is_not_fetched():
    world = crowded(num_blocks=8, num_sequences=2, max_tokens=25)
    step_until(world, lambda: world.preempted)
    (victim,) = world.preempted
    num_blocks = len(world.state.tiers.parked[victim].names)
    while world.state.tiers.transfers:
        world.transfer()
    world.abort(0)
    world.due()
    (fetch,) = world.effects(Fetch)
    assert len(fetch.block_ids) == 1 < num_blocks


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_without_tiers_a_victim_still_takes_back_what_nobody_needed(async_scheduling):
    world = crowded(num_blocks=8, num_sequences=2, max_tokens=25, num_host_blocks=0, async_scheduling=async_scheduling)
    while not world.preempted:
        world.due()
        world.done()
    (victim,) = world.preempted
    num_lost = world.effects(Preempt)[0].num_lost_tokens
    world.abort(0)
    while world.state.in_flight:
        world.done()
    plan = world.due()
    assert [row.start for row in plan.rows if row.sequence_id == victim] != [0]
    assert num_lost > plan.num_tokens
    world.run()


def test_without_host_room_the_disk_takes_the_rest_and_without_that_it_is_computed_again():
    world, sequence_id = swapping_out(num_host_blocks=1, num_disk_blocks=1, max_tokens=12)
    tiers = [(effect.tier, len(effect.moves)) for effect in world.effects(SwapOut)]
    assert tiers == [("host", 1), ("disk", 1)]
    world, sequence_id = swapping_out(num_host_blocks=1)
    assert world.effects(Preempt) == [Preempt(sequence_id, 4, "partial", "memory")]
    world.run()
    assert len(world.output(sequence_id)) == 12


@pytest.mark.parametrize("tiers", [(3, 0), (0, 3), (1, 2)], ids=str)
def test_a_host_pool_oversubscribed_ten_times_loses_nobody(tiers):
    host, disk = tiers
    tight, roomy = (
        World(num_blocks=n, num_host_blocks=host, num_disk_blocks=disk, preemption_method="swap", async_scheduling=True)
        for n in (9, 64)
    )
    for world in (tight, roomy):
        for prompt_len in (9, 12, 7, 11, 5, 8, 3, 10):
            world.arrive(prompt_len, max_tokens=18)
        world.run()
        assert_all_free(world)
    assert tight.effects(Fetch)
    assert {effect.method for effect in tight.effects(Preempt)} >= {"swap", "partial"}
    assert tight.tokens == roomy.tokens


@pytest.mark.parametrize(
    "make",
    [
        yielding,
        swapping_out,
        swapped,
        swapping_out_with_all_blocks_there,
        swapped_with_all_blocks_there,
        fetching,
        landing,
        yielding_again,
    ],
)
def test_an_abort_frees_every_tier_from_every_phase(make):
    world, sequence_id = make()
    for other in world.tokens:
        world.abort(other)
    while world.state.in_flight:
        world.done()
    assert world.finished[sequence_id] == "abort"
    while world.state.tiers.transfers:
        world.transfer()
    assert_all_free(world)


def test_blocks_in_transfer_are_not_free_though_their_sequence_is_gone():
    world, sequence_id = swapping_out()
    (swap_out,) = world.effects(SwapOut)
    world.abort(sequence_id)
    assert used(world, Tier.HOST) == len(swap_out.moves)
    world.transfer()
    assert used(world, Tier.HOST) == 0


def test_a_fetch_that_nobody_waits_for_any_more_is_discarded_when_it_comes():
    world, sequence_id = fetching()
    world.abort(sequence_id)
    assert not world.effects(Discard)
    assert world.state.pool.num_free == world.state.pool.num_blocks  # it goes to a staging, not to the cache
    (fetch,) = world.effects(Fetch)
    assert world.transfer() == (Discard(fetch.transfer_id),)


def test_a_fetch_that_came_for_an_aborted_sequence_is_discarded_at_once():
    world, sequence_id = landing()
    effects = world.abort(sequence_id)
    assert [type(effect) for effect in effects] == [Discard, Finish]
    assert world.finished[sequence_id] is FinishReason.ABORT


def test_a_sequence_readmitted_while_its_copies_are_on_their_way_goes_on_at_once():
    world, sequence_id = swapping_out_with_all_blocks_there()
    (row,) = world.due().rows
    assert (row.sequence_id, row.length) == (sequence_id, 1)
    assert not world.effects(Fetch)
    world.done()
    world.transfer()
    world.run()


def test_a_sequence_whose_copies_are_on_their_way_holds_up_nobody_when_there_is_room():
    world, sequence_id = swapping_out()
    other = world.arrive(1, max_tokens=1)
    world.abort(0)
    world.abort(1)
    plan = world.due()
    assert [row.sequence_id for row in plan.rows] == [other]
    assert phase(world, sequence_id) is Phase.SWAPPING_OUT


def test_a_failed_swap_out_means_recomputing_and_nothing_else():
    world, sequence_id = swapping_out()
    world.transfer(ok=False)
    assert used(world, Tier.HOST) == 0
    world.run()
    assert len(world.output(sequence_id)) == 12


def test_a_failed_fetch_costs_only_the_sequence_that_wanted_it():
    world, first, second = two_with_shared_copies()
    other = world.arrive(1, max_tokens=2)
    world.transfer(ok=False)
    world.run()
    assert {world.finished[i] for i in (first, second, other)} == {"length"}


def test_what_one_tier_still_has_is_used_when_the_other_fails():
    world, sequence_id = fetching(num_host_blocks=1, num_disk_blocks=8)
    disk = next(effect for effect in world.effects(Fetch) if effect.tier == "disk")
    world.transfer(disk.transfer_id, ok=False)
    assert [copy.tier for copy in world.state.tiers.parked[sequence_id].copies] == ["host"]
    assert phase(world, sequence_id) is Phase.SWAPPED
    world.run()


def test_two_sequences_with_one_prefix_share_its_copies():
    world, first, second = two_with_shared_copies()
    one, other = (world.state.tiers.parked[i].copies for i in (first, second))
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_a_sequence_that_is_fetched_too_soon_gives_its_blocks_back_and_keeps_its_copies():
    world, sequence_id = fetching_in_the_way()
    copies = world.state.tiers.parked[sequence_id].copies
    world.due()
    assert phase(world, sequence_id) is Phase.SWAPPED
    assert world.state.tiers.parked[sequence_id].copies == copies
    world.run()
    assert_all_free(world)


def costs(swap_us, token_us):
    return {"preemption_method": "auto", "swap_us_per_block": swap_us, "recompute_us_per_token": token_us}


@pytest.mark.parametrize(
    ("rates", "method"),
    # Its two full blocks come in again: twice the cost of one, against eight tokens.
    [(costs(10, 3), "swap"), (costs(10, 2), "recompute"), (costs(10, 1), "recompute"), (costs(0, 1), "swap")],
    ids=str,
)
def test_auto_takes_what_costs_less(rates, method):
    world, _ = swapping_out(**rates)
    assert [effect.method for effect in world.effects(Preempt)] == [method]


def test_without_a_lower_tier_preemption_recomputes_whatever_the_method():
    world, _ = swapping_out(num_host_blocks=0)
    assert [effect.method for effect in world.effects(Preempt)] == ["recompute"]


def test_the_method_recompute_leaves_the_tiers_alone():
    world, _ = swapping_out(preemption_method="recompute")
    assert not world.effects(SwapOut)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("method", ["swap", "recompute", "auto"])
def test_outputs_are_the_same_with_swapping_and_without(method, caching, async_scheduling):
    tight, roomy = (
        World(
            num_blocks=n,
            num_host_blocks=10,
            num_disk_blocks=10,
            preemption_method=method,
            enable_prefix_caching=caching,
            async_scheduling=async_scheduling,
        )
        for n in (7, 64)
    )
    for world in (tight, roomy):
        for prompt_len in (3, 9, 4, 6, 1):
            world.arrive(prompt_len, max_tokens=11)
        world.run()
    assert tight.preempted and not roomy.preempted
    assert tight.tokens == roomy.tokens
    assert_all_free(tight)
