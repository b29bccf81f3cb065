"""Hypothesis looks for an order of events that breaks the scheduler: all kinds, in any order, on small tight worlds."""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from pagedjax.core.phases import Phase
from pagedjax.core.policy import STAYS, order_of
from pagedjax.core.tiers import LOWER_TIERS, pool_of
from pagedjax.core.waiting import in_rank_order
from tests.core.world import World, random_change

LIMITS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4]),
        "num_blocks": st.integers(4, 20),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(4, 12),
        "max_model_len": st.just(24),
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "max_queued_requests": st.sampled_from([2, 100]),
        "stop_every": st.sampled_from([0, 3]),
        "tick_us": st.just(1000),
        "time_slice": st.sampled_from([0, 4]),
        "min_execution_chunk": st.sampled_from([0, 3]),
        "max_wait_s": st.sampled_from([0.02, 60.0]),
        "preemption_mode": st.sampled_from(["aggressive", "conservative"]),
        "preemption_method": st.sampled_from(["swap", "swap", "auto", "recompute"]),
        "num_host_blocks": st.sampled_from([0, 3, 20]),
        "num_disk_blocks": st.sampled_from([0, 4]),
        "fork_every": st.sampled_from([0, 2]),
        "force_every": st.sampled_from([0, 0, 2]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Every event is followed by `check`, by conservation of requests and, on the device, by a look at what is read."""

    @initialize(limits=LIMITS)
    def start(self, limits):
        self.world = World(**limits)

    @rule(
        shared=st.integers(0, 8),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        max_tokens=st.integers(1, 9),
        named=st.booleans(),
        beam=st.booleans(),
    )
    def arrive(self, shared, own, max_tokens, named, beam):
        self.world.arrive([7] * shared + own, max_tokens, named=named, beam=beam)

    @precondition(lambda self: self.world.tokens)
    @rule(which=st.integers(0, 30), num_samples=st.integers(1, 3))
    def arrive_as_forks(self, which, num_samples):
        parent = which % len(self.world.tokens)
        for _ in range(num_samples):
            self.world.arrive_as_fork(parent)

    @rule(
        priority=st.integers(-2, 2),
        prompt_len=st.integers(1, 14),
        tenant=st.sampled_from(["default", "gold"]),
        preemptible=st.booleans(),
    )
    def arrive_with_priority(self, priority, prompt_len, tenant, preemptible):
        self.world.arrive(prompt_len, 4, priority, tenant, preemptible)

    @rule(seed=st.integers(0, 99))
    def change(self, seed):
        random_change(self.world, random.Random(seed))

    @rule(which=st.integers(0, 30))
    def abort(self, which):
        self.world.abort(which)

    @rule()
    def step_due(self):
        top = self.best_ranked()
        self.world.due()
        self.check_progress(top)

    @precondition(lambda self: self.world.state.in_flight)
    @rule()
    def step_done(self):
        top = self.best_ranked()
        self.world.done()
        self.check_progress(top)

    @precondition(lambda self: self.world.state.tiers.transfers)
    @rule(which=st.integers(0, 5), ok=st.sampled_from([True, True, True, False]))
    def transfer_done(self, which, ok):
        under_way = sorted(self.world.state.tiers.transfers)
        self.world.transfer(under_way[which % len(under_way)], ok=ok)

    @precondition(lambda self: self.world.state.in_flight)
    @rule(suspects=st.lists(st.integers(0, 30), max_size=2))
    def step_failed(self, suspects):
        self.world.fail(*suspects)

    def best_ranked(self):
        """The best-ranked sequence that still runs, unless somebody in line is of a better grade."""
        state = self.world.state
        order = order_of(state._replace(now_us=state.now_us + self.world.tick_us), {})
        top = min((s for s in state.running if s.phase in STAYS), key=order.running, default=None)
        waiters = map(order.grade_in_line, in_rank_order(state.waiting))
        if top is None or top.phase is Phase.FETCHING:
            return None
        return None if min(waiters, default=(True,)) < order.grade(top) else top.sequence_id

    def check_progress(self, top):
        sequence = None if top is None else self.world.sequence(top)
        assert top not in self.world.waiting(), "the best-ranked running sequence was preempted"
        assert sequence is None or sequence.phase is not Phase.YIELDING, "the best-ranked running sequence must yield"

    def teardown(self):
        """With no more arrivals everything finishes within a bound, and every block comes back."""
        if not hasattr(self, "world"):
            return
        self.world.run()
        pool = self.world.state.pool
        assert len(self.world.finished) + len(self.world.rejected) == len(self.world.tokens)
        assert pool.num_free == pool.num_blocks
        tiers = self.world.state.tiers
        assert all(pool_of(tiers, tier).num_free == pool_of(tiers, tier).num_blocks for tier in LOWER_TIERS)
        assert not tiers.parked and not tiers.transfers and not tiers.landing
        assert not self.world.state.pending


def test_no_order_of_events_breaks_the_scheduler():
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=80,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
