"""Preemption at random moments, whatever the policy says, and every way to do without a victim's blocks."""

import random
from dataclasses import replace

from pagedjax.core.invariants import check
from pagedjax.core.phases import Cause, Phase, next_phase
from pagedjax.core.scheduler import init

# SchedulerConfig's fields for each; the engine's runner has as many blocks in both lower tiers, at least.
KINDS = {
    "recompute": {"preemption_method": "recompute"},
    "host": {"preemption_method": "swap", "num_host_blocks": 64},
    "disk": {"preemption_method": "swap", "num_disk_blocks": 64},
    "partial": {"preemption_method": "swap", "num_host_blocks": 3},
    "both": {"preemption_method": "swap", "num_host_blocks": 4, "num_disk_blocks": 60},
}


def use(engine, kind, num_blocks):
    """Let an idle engine begin anew with this way to preempt, and with so few blocks of its device's that those of the
    preempted do not stay there."""
    tiers = {"num_host_blocks": 0, "num_disk_blocks": 0, **KINDS[kind]}
    engine.state = init(replace(engine.state.config, num_blocks=num_blocks, **tiers))


def num_fetched_bytes(engine):
    (family,) = engine.metrics.swap_bytes.collect()
    return sum(s.value for s in family.samples if s.name.endswith("_total") and s.labels["direction"] == "in")


def run_forced(engine, requests, *, every, seed=0):
    """The token ids of each sequence, while one is preempted at each `every`-th step or so; 0 for never."""
    rng = random.Random(seed)
    found = {(request.request_id, index): [] for request in requests for index in range(request.params.n)}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for update in engine.step():
            found[update.request_id, update.delta.index] += update.delta.token_ids
        if every and rng.randrange(every) == 0:
            preempt(engine, rng)
        check(engine.state)
    while engine.state.tiers.transfers:  # copies that nobody waits for
        engine.step()
    return list(found.values())


def preempt(engine, rng):
    """Mark a running sequence that is in a step in flight: it leaves when that is done, unless it ends with it."""
    running = list(engine.state.running)
    able = [i for i, s in enumerate(running) if s.phase is Phase.RUNNING and s.num_in_flight]
    if able:
        index = rng.choice(able)
        victim = running[index]
        running[index] = victim._replace(phase=next_phase(victim.phase, Cause.PREEMPT))
        engine.state = engine.state._replace(running=tuple(running))
