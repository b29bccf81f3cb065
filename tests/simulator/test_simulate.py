"""The executor: the engine's loop on a virtual clock."""

from dataclasses import replace

import pytest

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import RunStep
from pagedjax.core.events import StepDone, StepDue
from pagedjax.core.invariants import check
from pagedjax.simulator import CostModel, Limits, Link, SimRequest, simulate
from pagedjax.simulator.report import Status
from pagedjax.simulator.workload import Traffic, mix

SLOW = Link(us_per_transfer=10, bytes_per_us=1)
# A step takes 100 us and 1 us a token, and is dispatched 5 us after it was planned.
COST = CostModel(
    source="round numbers",
    fixed_us=100,
    weights_us=0,
    us_per_token=1,
    us_per_row=0,
    us_per_context_token=0,
    us_per_pair=0,
    host_us=5,
    block_bytes=10,
    us_per_block_copied=1,
    host=SLOW,
    disk=SLOW,
)
CONFIG = SchedulerConfig(block_size=4, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)
BUSY = mix(
    Traffic(num_requests=30, rate=2000, prompt_median=20, output_median=10, prompt_sigma=1, output_sigma=0.5,
            max_prompt_len=100, max_output_len=40, max_tokens=60),
    Traffic(num_requests=10, rate=500, prompt_median=8, output_median=4, priority=-1, seed=1),
)  # fmt: skip


def request(prompt_len=8, output_len=3, arrival_us=0, **more):
    return SimRequest(arrival_us, prompt_len, output_len, **more)


def test_a_request_alone_takes_its_prefill_and_its_decodes():
    (outcome,) = simulate(CONFIG, [request(8, 3)], COST).outcomes
    assert list(outcome.token_us) == [5 + 108, 5 + 108 + 101, 5 + 108 + 202]
    assert (outcome.status, outcome.ttft_us, outcome.e2e_us, outcome.wait_us) == (Status.FINISHED, 113, 315, 0)
    assert outcome.tpot_us == 101


def test_the_hosts_time_hides_behind_a_step_in_flight_and_shows_without_one():
    ahead = simulate(CONFIG, [request(8, 10)], COST).end_us
    behind = simulate(replace(CONFIG, async_scheduling=False), [request(8, 10)], COST).end_us
    assert behind - ahead >= 9 * 5


def test_an_arrival_within_a_step_is_planned_when_a_step_ends():
    planned_at = []

    def note(before, event, state, effects):
        planned_at.extend(
            (event.now_us, [row.sequence_id for row in e.plan.rows]) for e in effects if isinstance(e, RunStep)
        )

    simulate(CONFIG, [request(8, 5), request(8, 2, arrival_us=50)], COST, observe=note)
    assert next(now_us for now_us, ids in planned_at if 1 in ids) == 113


def test_steps_are_done_in_order_and_one_is_in_flight_ahead():
    depth = []
    simulate(CONFIG, BUSY, COST, observe=lambda before, event, state, effects: depth.append(len(state.in_flight)))
    assert max(depth) == 2


def test_a_busy_run_keeps_every_invariant_and_finishes_everybody():
    report = simulate(replace(CONFIG, num_blocks=40), BUSY, COST, observe=lambda *seen: check(seen[2]))
    assert len(report.finished) == len(BUSY)
    assert report.preemptions
    assert [len(o.token_us) for o in report.outcomes] == [r.output_len for r in BUSY]


def test_equal_inputs_give_equal_reports():
    config = replace(CONFIG, num_blocks=40)
    assert simulate(config, BUSY, COST) == simulate(config, BUSY, COST)


def test_a_request_that_cannot_run_is_reported_as_rejected():
    report = simulate(CONFIG, [request(300, 10), request()], COST)
    assert [outcome.status for outcome in report.outcomes] == [Status.REJECTED, Status.FINISHED]


def test_a_job_that_is_swapped_out_and_in_computes_nothing_again_and_waits_for_its_link():
    config = replace(CONFIG, num_blocks=16, num_host_blocks=16, preemption_method="swap", time_slice=1)
    job, question = request(24, 30), request(60, 1, arrival_us=2_000, priority=-1)
    report = simulate(config, [job, question], COST, observe=lambda *seen: check(seen[2]))
    assert (report.preemptions_by("method"), report.totals.recomputed_tokens) == ({"swap": 1}, 0)
    out, back = report.transfers
    assert (out.to_device, back.to_device) == (False, True)
    assert out.end_us - out.start_us >= 10 + out.num_blocks * COST.block_bytes
    assert report.swapped_bytes(to_device=True) == back.num_blocks * COST.block_bytes
    assert report.totals.lost_us == out.num_blocks + back.num_blocks
    assert 0 < report.waste < 0.1


def test_a_run_that_is_cut_short_reports_who_is_unfinished():
    report = simulate(CONFIG, [request(8, 3), request(8, 50)], COST, until_us=400)
    assert [outcome.status for outcome in report.outcomes] == [Status.FINISHED, Status.UNFINISHED]
    assert report.end_us == 400


def test_a_stop_before_the_limit_discards_the_token_that_was_computed_ahead():
    report = simulate(CONFIG, [request(8, 3, max_tokens=20)], COST)
    assert (len(report.outcomes[0].token_us), report.totals.discarded_tokens) == (3, 1)


def test_recomputed_tokens_are_those_planned_twice():
    report = simulate(replace(CONFIG, num_blocks=40, enable_prefix_caching=False), BUSY, COST)
    first_time = sum(r.prompt_len + r.output_len - 1 for r in BUSY)
    ahead = report.totals.discarded_tokens
    assert report.totals.recomputed_tokens > 0
    assert report.totals.computed_tokens == first_time + report.totals.recomputed_tokens + ahead


def test_prompts_with_equal_names_share_their_blocks():
    names = tuple(bytes([i]) * 32 for i in range(10))
    twins = [request(42, 2, block_names=names), request(42, 2, arrival_us=10_000, block_names=names)]
    report = simulate(CONFIG, twins, COST)
    assert report.totals.cached_tokens == 40
    assert report.outcomes[1].ttft_us < report.outcomes[0].ttft_us


def test_a_prompt_without_names_gets_none_for_the_blocks_that_it_fills_later():
    report = simulate(CONFIG, [request(6, 20, block_names=()), request(3, 20, block_names=())], COST)
    assert [outcome.status for outcome in report.outcomes] == [Status.FINISHED] * 2


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_samples_of_one_request_share_all_of_its_prompts_blocks(enable_prefix_caching):
    config, most = replace(CONFIG, enable_prefix_caching=enable_prefix_caching), []
    samples = [request(42, 4, sample_index=index) for index in range(4)]
    other = request(5, 4)
    report = simulate(
        config, [other, *samples], COST, observe=lambda _, event, after, effects: most.append(len(after.pool.counts))
    )
    assert report.totals.cached_tokens == 3 * 41
    # Ten full blocks, and of the partial one behind them and the next a copy each; two for the other request.
    assert max(most) <= 10 + 4 * 2 + 2


def test_requests_of_one_prefix_share_what_lies_before_their_own_tokens():
    first, second = (
        request(42, 2, prefix="system", prefix_len=30),
        request(50, 2, 10_000, prefix="system", prefix_len=30),
    )
    assert simulate(CONFIG, [first, second], COST).totals.cached_tokens == 28
    assert simulate(CONFIG, [first, second._replace(prefix="other")], COST).totals.cached_tokens == 0


def test_service_agrees_with_the_schedulers_own_books():
    tenants = mix(
        *(
            Traffic(num_requests=20, rate=3000, prompt_median=20, output_median=8, tenant=tenant, seed=seed,
                    prompt_sigma=1, max_prompt_len=100, max_tokens=10, max_output_len=10)
            for seed, tenant in enumerate(("gold", "bronze"))
        )
    )  # fmt: skip
    states = []
    report = simulate(replace(CONFIG, num_blocks=40), tenants, COST, observe=lambda *seen: states.append(seen[2]))
    for tenant in ("gold", "bronze"):
        assert report.service[tenant][-1].num_tokens == states[-1].tenants.accounts[tenant].service
    assert report.service_between("gold", -1, report.end_us) == report.service["gold"][-1].num_tokens
    assert report.service_between("gold", report.end_us, report.end_us + 1) == 0


def test_waste_counts_the_empty_end_of_the_last_block():
    # 5 tokens in 2 blocks of 4 while the prompt is computed and its token sampled; the second step is planned at once.
    report = simulate(replace(CONFIG, async_scheduling=False), [request(5, 1)], COST)
    assert report.waste == pytest.approx(3 / 8)
    assert report.waste_until_computed == 1


def test_goodput_counts_only_requests_within_every_bound():
    report = simulate(CONFIG, [request(8, 3), request(60, 30)], COST)
    assert report.goodput_requests_per_s(Limits()) == report.requests_per_s
    limits = Limits(e2e_us=report.outcomes[0].e2e_us)
    assert report.goodput_requests_per_s(limits) == pytest.approx(report.requests_per_s / 2)


def test_observers_see_every_event_once_and_in_order():
    events = []
    simulate(CONFIG, BUSY, COST, observe=lambda before, event, state, effects: events.append(event))
    assert [e.now_us for e in events] == sorted(e.now_us for e in events)
    assert [e.plan_id for e in events if isinstance(e, StepDone)] == list(
        range(sum(isinstance(e, StepDone) for e in events))
    )
    assert any(isinstance(e, StepDue) for e in events)
