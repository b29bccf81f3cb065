"""Fair shares: what a tenant is charged, whose turn it is, and how far apart the tenants can get."""

from itertools import combinations

import pytest
from immutables import Map

from pagedjax.core import tenants as accounts
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import ConfigError
from pagedjax.core.tenants import MAX_TENANTS, SCALE, WINDOW, Tenant, Tenants
from tests.core.flood import Flood, Source, mixed_lengths, same_lengths
from tests.core.world import World

WEIGHTS = {"gold": 3, "silver": 2, "bronze": 1}


def service_of(world, tenant="default"):
    return accounts.account(world.state.tenants, tenant).service


def flood_config(**changes):
    limits = {"num_blocks": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256, "tenant_weights": WEIGHTS}
    return SchedulerConfig(**{**limits, **changes})


# ---- what is charged


def test_a_prompt_token_costs_one_and_a_sampled_token_two():
    world = World()
    world.arrive(5, max_tokens=3)
    world.run()
    assert service_of(world) == 5 + 2 * 3


def test_a_step_is_charged_when_it_is_planned():
    world = World(max_num_batched_tokens=8)
    world.arrive(12, max_tokens=3)
    world.due()
    assert service_of(world) == 8


def test_tokens_from_the_prefix_cache_cost_nothing():
    world = World(block_size=4)
    world.arrive(list(range(9)), max_tokens=1)
    world.run()
    world.arrive(list(range(9)), max_tokens=1)
    world.run()
    assert service_of(world) == (9 + 2) + (1 + 2)


def test_what_is_computed_again_after_a_preemption_costs_nothing():
    world = World(num_blocks=6, enable_prefix_caching=False)
    for _ in range(3):
        world.arrive(4, max_tokens=12)
    world.run()
    assert world.preempted
    assert world.num_computed > 3 * (4 + 12 - 1)
    assert service_of(world) == 3 * (4 + 2 * 12)


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_a_sampled_token_that_is_thrown_away_is_refunded(end):
    world = World(async_scheduling=True, stop_every=1 if end == "stop" else 0)
    world.arrive(5, max_tokens=9)
    world.due()
    world.due()
    if end == "abort":
        world.abort(0)
    world.run()
    assert world.num_discarded == (1 if end == "stop" else 2)
    assert service_of(world) == 5 + 2 * len(world.output(0))


# ---- whose turn it is


def test_the_counter_grows_by_service_over_weight():
    tenants = accounts.enter(Tenants(), "gold", (), (("gold", 3),))
    tenants = accounts.charge(tenants, {"gold": 300})
    assert accounts.counter(tenants, "gold") == 100 * SCALE
    assert accounts.counter(tenants, "gold", 30) == 110 * SCALE


def test_the_least_served_tenant_goes_first_whoever_came_first():
    world = World(max_num_seqs=1)
    world.arrive(8, max_tokens=1, tenant="a")
    first, second, other = world.arrive(8, tenant="a"), world.arrive(8, tenant="a"), world.arrive(8, tenant="b")
    assert world.waiting() == [0, first, second, other]
    world.step()  # a has had 10 service tokens, b none
    assert world.waiting() == [other, first, second]


def test_turns_change_within_a_step_that_admits_several():
    world = World(max_num_seqs=4)
    for tenant in "aaaabbbb":
        world.arrive(8, tenant=tenant)
    world.due()
    assert world.running() == [0, 1, 4, 5]


def test_priority_decides_before_the_tenant_s_turn():
    world = World(max_num_seqs=1)
    world.arrive(8, max_tokens=1, tenant="a")
    urgent, other = world.arrive(8, priority=-1, tenant="a"), world.arrive(8, tenant="b")
    world.step()
    world.step()
    assert world.waiting()[:1] == [other] and urgent not in world.waiting()


def test_when_blocks_run_out_the_most_served_tenant_gives_way():
    world = World(num_blocks=6, enable_prefix_caching=False, preemption_strategy="priority")
    world.arrive(8, max_tokens=1, tenant="a")
    world.run()
    early = world.arrive(4, max_tokens=12, tenant="a")
    late = [world.arrive(4, max_tokens=12, tenant="b") for _ in range(2)]
    world.state = world.state._replace(tenants=accounts.charge(world.state.tenants, {"a": 1000}))
    while len(world.preempted) < 1:
        world.step()
    assert (world.preempted, world.running()) == ([early], late)


def test_an_idle_tenant_banks_no_credit():
    flood = Flood(flood_config(tenant_weights={}), Source("busy"))
    run_for(flood, 50_000)
    flood.sources.append(Source("late"))
    before = flood.service.copy()
    run_for(flood, 20_000)
    got = flood.service - before
    assert 0.85 < got["late"] / got["busy"] < 1.15


def test_a_tenant_that_enters_an_empty_line_starts_where_the_last_one_left_it():
    tenants = accounts.enter(Tenants(), "old", (), ())
    tenants = accounts.charge(tenants, {"old": 700})
    tenants = accounts.leave(tenants, ("old",), ())
    tenants = accounts.enter(tenants, "new", (), ())
    assert accounts.counter(tenants, "new") == 700 * SCALE


def test_a_share_counts_only_what_was_served_since_the_tenant_got_in_line():
    tenants = accounts.enter(Tenants(), "a", (), ())
    tenants = accounts.charge(tenants, {"a": 30_000})
    tenants = accounts.enter(tenants, "b", ("a",), ())
    tenants = accounts.charge(tenants, {"a": 600, "b": 400})
    assert accounts.share(tenants, "b") == (400, 1000)
    assert accounts.share(tenants, "a") == (30_600, 31_000)


def test_a_share_forgets_what_is_longer_ago_than_the_window():
    tenants = accounts.enter(Tenants(), "a", (), ())
    for name in ("a", "b"):
        for _ in range(2 * WINDOW // 100):
            tenants = accounts.charge(tenants, {name: 100, "a": 0})
    own, total = accounts.share(tenants, "a")
    assert own == 0 and WINDOW // 2 <= total <= WINDOW


def test_weights_count_while_a_tenant_was_backlogged_in_the_last_window():
    tenants = accounts.enter(Tenants(), "a", (), (("a", 3),))
    tenants = accounts.enter(tenants, "b", ("a",), ())
    tenants = accounts.leave(tenants, ("a", "b"), ("a",))
    assert accounts.weight_in_use(tenants, ("a",)) == 4
    tenants = accounts.charge(tenants, {"a": WINDOW})
    assert accounts.weight_in_use(tenants, ("a",)) == 3


def test_accounts_of_idle_tenants_are_dropped_before_they_become_too_many():
    busy = {f"t{i}": Tenant() for i in range(MAX_TENANTS)}
    tenants = Tenants(Map(busy), total=2 * WINDOW)
    tenants = accounts.enter(tenants, "new", ("t3",), (("t7", 2),))
    assert set(tenants.accounts) == {"t3", "t7", "new"}


# ---- how far apart they get


def test_three_saturated_tenants_get_their_weights_share_of_every_100_000_service_tokens():
    flood = Flood(flood_config(), *map(Source, WEIGHTS))
    run_for(flood, 5_000)
    for _ in range(4):
        before = flood.service.copy()
        run_for(flood, WINDOW)
        got = flood.service - before
        for tenant, weight in WEIGHTS.items():
            assert got[tenant] / got.total() == pytest.approx(weight / 6, rel=0.05)


@pytest.mark.parametrize(("lengths", "rel"), [(mixed_lengths, 0.05), (same_lengths, 0.15)], ids=["mixed", "equal"])
def test_one_request_in_line_at_all_times_is_enough_for_a_tenant_s_share(lengths, rel):
    """Of slots that come free in one step, as those of equal lengths do, it can take only one."""
    depths = {"gold": 1, "silver": 4, "bronze": 4}
    flood = Flood(flood_config(), *(Source(tenant, lengths, depth=depth) for tenant, depth in depths.items()))
    run_for(flood, 5_000)
    before = flood.service.copy()
    run_for(flood, WINDOW)
    got = flood.service - before
    assert got["gold"] / got.total() == pytest.approx(3 / 6, rel=rel)


def test_a_tenant_with_little_to_do_banks_no_more_credit_than_a_request_s_worth():
    """One short request after another for a long time, and then a flood."""
    flood = Flood(flood_config(tenant_weights={}), Source("busy"), Source("modest", lambda rng: (16, 8), depth=1))
    modest = flood.sources.pop()
    while flood.service["busy"] < 60_000:
        if not any(s.request.tenant == "modest" for s in flood.state.running) and not flood.num_in_line("modest"):
            flood.arrive("modest", *modest.lengths(flood.rng))
        flood.step()
    flood.sources.append(Source("modest"))
    before = flood.service.copy()
    run_for(flood, 20_000)
    got = flood.service - before
    assert abs(got["modest"] - got["busy"]) <= flood.state.config.credit + 16 * (64 + 2 * 64)


@pytest.mark.parametrize("seed", range(3))
def test_tenants_with_mixed_lengths_stay_within_vtc_s_bound(seed):
    """|S_i / w_i - S_j / w_j| <= 2 max(longest prompt, 2 x tokens resident) while both are backlogged (OSDI'24)."""
    config = flood_config(num_blocks=192, tenant_weights={**WEIGHTS, "lead": 1})
    flood = Flood(config, *(Source(tenant, mixed_lengths) for tenant in (*WEIGHTS, "lead")), seed=seed)
    bound = 2 * max(1500, 2 * config.num_blocks * config.block_size)
    weights, widest = dict(config.tenant_weights), 0.0
    while flood.service.total() < 200_000:
        flood.step()
        normal = {tenant: flood.service[tenant] / weights[tenant] for tenant in weights}
        widest = max(widest, *(abs(normal[a] - normal[b]) for a, b in combinations(weights, 2)))
    assert widest <= bound
    assert widest > 100  # or the requests are too much alike to mean something


def test_the_scheduler_counts_service_as_it_is_defined():
    flood = Flood(flood_config(num_blocks=100), *(Source(tenant, mixed_lengths) for tenant in WEIGHTS))
    run_for(flood, 60_000)
    assert flood.preemptions
    assert {t: accounts.account(flood.state.tenants, t).service for t in WEIGHTS} == dict(flood.service)


def run_for(flood, num_service_tokens):
    end = flood.service.total() + num_service_tokens
    while flood.service.total() < end:
        flood.step()
        if flood.num_steps % 500 == 0:
            flood.check()


# ---- the queue and the configuration


def test_a_tenant_may_fill_its_share_of_the_queue_only():
    world = World(max_num_seqs=1, max_queued_requests=8, tenant_weights={"gold": 3, "bronze": 1})
    ids = [world.arrive(5, tenant="bronze") for _ in range(3)]
    assert world.rejected[ids[2]].code == "queue_full"
    assert world.rejected[ids[2]].message == "The queue of tenant bronze is full: 2 requests, 10 tokens."
    assert not {world.arrive(5, tenant="gold") for _ in range(6)} & set(world.rejected)


def test_a_tenant_without_a_name_in_the_weights_has_the_weight_one():
    world = World(max_num_seqs=1, max_queued_requests=8, tenant_weights={"gold": 3})
    ids = [world.arrive(5, tenant="stranger") for _ in range(3)]
    assert list(world.rejected) == [ids[2]]


def test_without_weights_any_tenant_may_fill_the_queue():
    world = World(max_num_seqs=1, max_queued_requests=3)
    ids = [world.arrive(5, tenant="a") for _ in range(4)]
    assert (list(world.rejected), world.rejected[ids[3]].message) == (
        [ids[3]],
        "The queue is full: 3 requests, 15 tokens.",
    )


@pytest.mark.parametrize("weights", [{"a": 0}, {"a": 1.5}, {"a": True}, [("a", 1), ("a", 2)]], ids=str)
def test_impossible_weights_are_refused_by_their_flag(weights):
    with pytest.raises(ConfigError, match="--tenant-weights"):
        SchedulerConfig(tenant_weights=weights)


def test_weights_may_be_a_mapping_and_are_kept_sorted():
    assert SchedulerConfig(tenant_weights={"b": 1, "a": 2}).tenant_weights == (("a", 2), ("b", 1))
