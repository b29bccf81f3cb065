"""Beams whose next tokens are chosen together, once all of a group have been heard: whatever becomes of them meanwhile,
the chosen ones are the same. Blocks hold four tokens here."""

import random

import pytest

from pagedjax.core.effects import Preempt
from pagedjax.core.errors import SchedulerError
from pagedjax.core.events import StepDone, StepFailed
from pagedjax.core.phases import Phase
from pagedjax.core.plan import Fork, RowResult
from pagedjax.core.request import FinishReason
from pagedjax.core.scheduler import update
from tests.core.world import World


class BeamWorld(World):
    """Every request is a group of `width` beams. Each of them offers three tokens, and the `width` best of all go on; a
    token that a multiple of `stop_every` ends one. `results` are what groups have given, by their first sequence."""

    def __init__(self, *, width: int, **limits):
        super().__init__(**limits)
        self.width = width
        self.group_of: dict[int, int] = {}
        self.heard: dict[int, int] = {}  # sequence -> the token that its last row gave
        self.results: dict[int, list[list[int]]] = {}

    def arrive_group(self, prompt, max_tokens=12, **wishes):
        first = self.arrive(prompt, max_tokens, beam=True, **wishes)
        self.group_of[first], self.results[first] = first, []
        return first

    def members(self, group):
        return [i for i, one in self.group_of.items() if one == group and i not in self.ended]

    def done(self):
        plan, sampled = self.state.in_flight[0], self.sampled.popleft()
        rows = [row.sequence_id for row in plan.rows]
        self.heard |= {i: token for i, token in sampled.items() if i not in self.ended}
        chosen = {}
        for group in sorted({self.group_of[i] for i in sampled}):
            members = self.members(group)
            if members and all(i in self.heard for i in members):
                chosen |= self.choose(group, members)
        results = tuple(chosen.pop(i, RowResult(i, 0)) for i in rows)
        return self.send(StepDone(plan.plan_id, results, self.tick(), tuple(chosen.values())))

    def choose(self, group, members):
        request = self.requests[group]
        offers = [(self.tokens[i], self.heard[i] + 100 * extra, i) for i in members for extra in range(3)]
        for i in members:
            del self.heard[i]
        offers.sort(key=lambda offer: (offer[1] * 7919 % 1009, offer[:2]))
        live: dict[int, list[int]] = {i: [] for i in members}
        for tokens, token, i in offers[: self.width]:
            output = [*tokens[request.prompt_len :], token]
            if len(output) == request.max_tokens or (self.stop_every and token % self.stop_every == 0):
                self.results[group].append(output)
            else:
                live[i].append(token)
        return {i: self.result(i, kept) for i, kept in live.items()}

    def result(self, i, kept):
        before, num_named = list(self.tokens[i]), len(self.names(i))
        forks = []
        for place, token in enumerate(kept):
            target = i if place == 0 else len(self.tokens)
            self.tokens[target] = [*before, token]
            self.on_device[target] = [*before, token]
            if place:
                self.requests[target] = self.requests[i]._replace(sequence_id=target)
                self.group_of[target] = self.group_of[i]
                self.unnamed |= {target} if i in self.unnamed else set()
                forks.append(Fork(target, self.names(target)[num_named:]))
        if not kept:
            self.ended.add(i)
            return RowResult(i, 0, FinishReason.ABORT)
        return RowResult(i, 1, None, self.names(i)[num_named:], tuple(forks))

    def fail(self, *suspects):
        self.on_device = {i: list(tokens) for i, tokens in self.tokens.items()}
        return super().fail(*suspects)


def outcome(width, *, force_every=0, seed=0, fail_at=None, num_groups=2, **limits):
    """What the groups give, and the world that gave it. A random running sequence is preempted now and then."""
    world, rng = BeamWorld(width=width, **limits), random.Random(seed)
    for prompt_len in range(5, 5 + num_groups):
        world.arrive_group(prompt_len, named=prompt_len != 6)
    num_turns = 0
    while world.state.running or world.state.waiting.places:
        num_turns += 1
        assert num_turns < 2000, "it goes round in circles"
        plan = world.due()
        if force_every and rng.randrange(force_every) == 0:
            force(world, rng)
        if num_turns == fail_at and world.state.in_flight:
            world.fail()
        elif world.state.tiers.transfers and (plan is None or rng.random() < 0.5):
            world.transfer(ok=rng.random() < 0.9)
        elif world.state.in_flight:
            world.done()
        else:
            assert plan, "stuck: there is work, but nothing is planned and nothing is in flight"
    while world.state.tiers.transfers:
        world.transfer()
    assert world.state.pool.num_free == world.state.pool.num_blocks
    return {group: sorted(found) for group, found in world.results.items()}, world


def force(world, rng):
    """Preempt somebody who is in a step in flight."""
    running = list(world.state.running)
    able = [i for i, s in enumerate(running) if s.phase is Phase.RUNNING and s.num_in_flight]
    if able:
        index = rng.choice(able)
        running[index] = running[index]._replace(phase=Phase.YIELDING)
        world.state = world.state._replace(running=tuple(running))


TIGHT = {
    "few blocks": {"num_blocks": 8},
    "fewest blocks": {"num_blocks": 5},
    "few slots": {"max_num_seqs": 2},
    "one slot": {"max_num_seqs": 1},
    "small steps": {"max_num_batched_tokens": 3, "max_num_seqs": 3},
    "host tier": {"num_blocks": 8, "num_host_blocks": 6, "preemption_method": "swap"},
    "no prefix cache": {"num_blocks": 8, "enable_prefix_caching": False, "num_host_blocks": 20},
    "conservative": {"num_blocks": 8, "preemption_mode": "conservative"},
    "no preemption": {"num_blocks": 8, "enable_preemption": False},
}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("limits", TIGHT.values(), ids=TIGHT)
def test_groups_give_the_same_however_short_of_room_they_are(limits, async_scheduling):
    expected, roomy = outcome(4, stop_every=7)
    assert not roomy.effects(Preempt) and all(expected.values())
    found, _ = outcome(4, stop_every=7, async_scheduling=async_scheduling, **limits)
    assert found == expected


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_blocks", [7, 64])
def test_groups_give_the_same_when_their_beams_are_preempted_at_random(seed, num_blocks):
    expected, _ = outcome(3)
    found, world = outcome(
        3,
        force_every=2,
        seed=seed,
        num_blocks=num_blocks,
        num_host_blocks=5,
        preemption_method="swap",
        async_scheduling=bool(seed % 2),
    )
    assert found == expected
    assert len(world.effects(Preempt)) > 3


@pytest.mark.parametrize("fail_at", range(1, 10))
@pytest.mark.parametrize("num_blocks", [7, 64])
def test_a_step_that_fails_costs_a_group_nothing_but_time(fail_at, num_blocks):
    expected, _ = outcome(3)
    found, world = outcome(3, fail_at=fail_at, num_blocks=num_blocks, num_host_blocks=8, preemption_method="swap")
    assert found == expected
    assert any(isinstance(event, StepFailed) for event, _ in world.log)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(9, 8), (8, 6), (3, 10), (14, 5)])
def test_a_group_holds_the_full_blocks_of_its_prompt_once(prompt_len, max_tokens):
    world, width, size = BeamWorld(width=4), 4, 4
    world.arrive_group(prompt_len, max_tokens)
    most = 0
    while world.state.running or world.state.waiting.places:
        world.due()
        world.done()
        most = max(most, len(world.state.pool.counts))
    shared = prompt_len // size
    assert most <= shared + width * (-(-(prompt_len + max_tokens) // size) - shared)


def heard_one_of_two():
    """Two beams of one group, of which one awaits its choice while the other is in flight."""
    world = BeamWorld(width=2, num_blocks=16, max_num_batched_tokens=2, max_num_seqs=2)
    world.arrive_group(3)
    while len(world.state.running) < 2:
        world.due()
        world.done()
    world.due()
    first, second = world.running()
    plan = world.state.in_flight[0]
    state, _ = update(world.state, StepDone(plan.plan_id, (RowResult(first, 0), RowResult(second, 0)), 99))
    return state, first, second


def test_one_who_awaits_a_choice_keeps_its_slot_and_is_in_no_step():
    state, first, second = heard_one_of_two()
    assert [(s.sequence_id, s.awaits_choice, s.phase) for s in state.running] == [
        (first, True, Phase.RUNNING),
        (second, True, Phase.RUNNING),
    ]


@pytest.mark.parametrize(
    ("complaint", "choice"),
    [
        ("is not here", RowResult(77, 1)),
        ("cannot go on", RowResult(0, 0)),
        ("full blocks", RowResult(0, 1, None, (b"x" * 32,) * 3)),
        ("is here already", RowResult(0, 1, None, (), (Fork(0),))),
    ],
)
def test_an_impossible_choice_raises(complaint, choice):
    world = BeamWorld(width=2)
    group = world.arrive_group(5)
    other = world.arrive([9, 9, 9])
    world.due()
    plan = world.state.in_flight[0]
    assert [row.sequence_id for row in plan.rows] == [group, other]
    state, _ = update(world.state, StepDone(plan.plan_id, (RowResult(group, 0), RowResult(other, 1)), 99))
    state, effects = update(state, world.log[-1][0].__class__(100))
    plan = effects[-1].plan
    with pytest.raises(SchedulerError, match=complaint):
        update(state, StepDone(plan.plan_id, (RowResult(other, 1),), 101, (choice,)))


def test_who_awaits_nothing_gets_no_choice():
    world = BeamWorld(width=2)
    world.arrive([9, 9, 9])
    world.due()
    plan = world.state.in_flight[0]
    with pytest.raises(SchedulerError, match="awaits no choice"):
        update(world.state, StepDone(plan.plan_id, (RowResult(0, 1),), 99, (RowResult(0, 1),)))
