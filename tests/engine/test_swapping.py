"""The engine over tiers below a counting device, whose blocks hold tokens: whatever moves, fails or comes late, every
request gets what it would have got alone."""

import random

import pytest

from pagedjax.core.invariants import check
from pagedjax.core.phases import Phase
from pagedjax.core.plan import Tier
from tests.engine.fakes import CRASH, POISON, make_engine, num_preemptions
from tests.engine.test_engine import assert_nothing_is_left, params, run


def crowded(**options):
    """An engine whose device holds fewer sequences than it may run."""
    return make_engine(**{"num_gpu_blocks_override": 12, "num_host_blocks": 40, "preemption_method": "swap", **options})


def run_all(engine, prompts, sampling, *, aborted=()):
    """What each prompt gave, None for an error; requests in `aborted` are dropped on the way."""
    for i, prompt in enumerate(prompts):
        engine.add(engine.prepare(prompt, sampling, request_id=str(i)))
    found = {str(i): [] for i in range(len(prompts))}
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        assert num_steps < 3000
        for update in engine.step():
            if update.error is not None:
                found[update.request_id] = None
            else:
                found[update.request_id].extend(update.delta.token_ids)
        if num_steps % 5 == 0 and aborted:
            engine.abort(aborted.pop())
        check(engine.state)
    return list(found.values())


def settle(engine):
    """Let the transfers that are still under way end."""
    while engine.state.tiers.transfers:
        engine.step()


def prompts_of(num_prompts):
    return [list(range(1 + i % 3, 5 + i % 9)) for i in range(num_prompts)]


def alone(prompts, sampling):
    return [run(make_engine(), prompt, sampling).outputs[0].token_ids for prompt in prompts]


TIERS = {
    "host": {},
    "disk": {"num_host_blocks": 0, "num_disk_blocks": 40},
    "both": {"num_host_blocks": 3, "num_disk_blocks": 40},
    "too small": {"num_host_blocks": 3},
    "none": {"num_host_blocks": 0},
}


@pytest.mark.parametrize("transfer_polls", [1, 4])
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_outputs_are_those_of_each_request_alone(tiers, transfer_polls, async_scheduling):
    engine = crowded(**{**tiers, "async_scheduling": async_scheduling})
    engine.runner.transfer_polls = transfer_polls
    prompts, wish = prompts_of(16), params(max_tokens=20, ignore_eos=True)
    assert run_all(engine, prompts, wish) == alone(prompts, wish)
    assert num_preemptions(engine) > 0
    settle(engine)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("seed", range(4))
def test_transfers_that_fail_cost_time_only(seed):
    rng = random.Random(seed)
    engine = crowded(num_host_blocks=10, num_disk_blocks=40)
    engine.runner.fails_transfer = lambda transfer_id: rng.random() < 0.5
    prompts, wish = prompts_of(16), params(max_tokens=20, ignore_eos=True)
    assert run_all(engine, prompts, wish) == alone(prompts, wish)
    settle(engine)
    assert_nothing_is_left(engine)
    failures = engine.metrics.swap_failures.collect()[0].samples
    assert sum(sample.value for sample in failures if sample.name.endswith("_total")) > 0


def test_aborts_in_any_state_free_every_tier():
    for seed in range(6):
        engine = crowded(num_host_blocks=10, num_disk_blocks=10)
        engine.runner.transfer_polls = 3
        aborted = [str(i) for i in random.Random(seed).sample(range(16), 12)]
        run_all(engine, prompts_of(16), params(max_tokens=20, ignore_eos=True), aborted=aborted)
        settle(engine)
        assert_nothing_is_left(engine)


@pytest.mark.parametrize("tiers", [{}, {"num_host_blocks": 0}])
def test_a_step_that_fails_now_and_then_loses_nobody(tiers):
    engine = crowded(**tiers)
    prompts, wish = prompts_of(12), params(max_tokens=16, ignore_eos=True)
    dispatch = engine.runner.dispatch

    def failing(plan):
        engine.runner.fail_at_plan = plan.plan_id if plan.plan_id % 7 == 3 and len(plan.rows) > 1 else None
        return dispatch(plan)

    engine.runner.dispatch = failing
    assert run_all(engine, prompts, wish) == alone(prompts, wish)
    assert engine.metrics.step_failures._value.get() > 3
    assert engine.runner.num_resets == 1 + engine.metrics.step_failures._value.get()
    settle(engine)
    assert_nothing_is_left(engine)


def test_a_request_that_makes_its_steps_fail_is_the_only_one_lost():
    engine = crowded()
    prompts, wish = [*prompts_of(3), [CRASH, 1, 2], *prompts_of(3)], params(max_tokens=12, ignore_eos=True)
    found = run_all(engine, prompts, wish)
    assert found[3] is None
    assert found[:3] + found[4:] == alone([*prompts_of(3)] * 2, wish)
    settle(engine)
    assert_nothing_is_left(engine)


def test_logits_that_are_not_finite_stay_with_their_request_when_others_are_swapped():
    engine = crowded()
    prompts, wish = [*prompts_of(8), [POISON, 1, 2], *prompts_of(8)], params(max_tokens=16, ignore_eos=True)
    found = run_all(engine, prompts, wish)
    assert found[8] is None
    assert found[:8] + found[9:] == alone([*prompts_of(8)] * 2, wish)
    assert engine.metrics.step_failures._value.get() == 0


def test_blocks_with_a_good_copy_are_kept_without_another():
    engine = crowded()
    run_all(engine, prompts_of(16), params(max_tokens=32, ignore_eos=True))
    num_dirty, num_clean = (engine.metrics.parked_blocks.labels(copy)._value.get() for copy in ("dirty", "clean"))
    assert num_dirty > 0 and num_clean > 0
    assert engine.metrics.swap_bytes.labels(Tier.HOST, "out")._value.get() > 0
    assert engine.metrics.state_save_time._sum.get() > 0


def test_an_engine_with_nothing_but_fetches_waits_for_them():
    engine = crowded(num_gpu_blocks_override=6, max_num_seqs=2, enable_prefix_caching=False)
    engine.runner.transfer_polls = 20
    for i in range(2):
        engine.add(engine.prepare([1 + i, 2, 3], params(max_tokens=18, ignore_eos=True), request_id=str(i)))
    num_idle = 0
    while engine.has_work:
        engine.step()
        num_idle += not engine.state.in_flight and any(s.phase is Phase.FETCHING for s in engine.state.running)
    assert num_idle > 3
