"""`pagedjax replay`: a recording (`serve --record FILE`) run again through the scheduler, event by event.

The scheduler is a function of its state and the event, so the effects must be those that were recorded, bit for bit.
Any event's state can be looked at, and the same requests can be tried under another configuration, on the simulator.
"""

import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.draw import state_html
from pagedjax.core.effects import Effect, Preempt, Reject, RunStep
from pagedjax.core.errors import ConfigError
from pagedjax.core.events import Arrived, Event, StepDone
from pagedjax.core.scheduler import init, update
from pagedjax.core.state import State
from pagedjax.engine.record import Session, digest, read
from pagedjax.simulator import PRESETS, SimReport, SimRequest, simulate


@dataclass(slots=True)
class Replay:
    """How far a session was followed: the state after its last event, what happened, where it first differed."""

    state: State
    events: Counter[str] = field(default_factory=Counter)
    preemptions: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    num_refused: int = 0
    difference: str | None = None


def run(path: str, *, at: int | None, html: str | None, what_if: Sequence[str], cost: str) -> int:
    """Print what a recording holds. Gives 1 if the scheduler would do otherwise today, else 0."""
    sessions = list(read(Path(path)))
    if len(sessions) > 1 and (at is not None or html or what_if):
        print(f"{len(sessions)} sessions; --at, --html and --what-if are about the last one")
    status = 0
    for number, session in enumerate(sessions, 1):
        is_last = number == len(sessions)
        found = replay(session, at if is_last else None)
        print(f"session {number}: {describe(session, found)}")
        status = max(status, int(found.difference is not None))
        if is_last and (at is not None or html):
            show(found.state, html)
        if is_last and what_if:
            compare(session, what_if, cost)
    return status


def replay(session: Session, at: int | None = None) -> Replay:
    """Fold `update` over the session's events, or the first `at` of them, to the first difference.

    Raises ConfigError if there are not so many.
    """
    if at is not None and not 0 <= at <= len(session.events):
        raise ConfigError(
            f"the session has {len(session.events)} events; set --at to 0..{len(session.events)}, not {at}"
        )
    found = Replay(init(session.config))
    for line, event, recorded in session.events[:at]:
        try:
            state, effects = update(found.state, event)
        except Exception as error:  # a scheduler that raised is replayed like any other answer
            answer = f"raised {type(error).__name__}"
        else:
            answer = digest(effects)
            _count(found, event, effects)
            found.state = state
        if answer != recorded:
            found.difference = f"line {line}: {type(event).__name__} was answered by {recorded}, now by {answer}"
            break
        if answer.startswith("raised"):
            break
    return found


def _count(found: Replay, event: Event, effects: Iterable[Effect]) -> None:
    found.events[type(event).__name__] += 1
    for effect in effects:
        found.num_steps += isinstance(effect, RunStep)
        found.num_refused += isinstance(effect, Reject)
        if isinstance(effect, Preempt):
            found.preemptions[f"{effect.reason} by {effect.method}"] += 1


def describe(session: Session, found: Replay) -> str:
    """A few lines of text."""
    num_events = sum(found.events.values())
    seconds = (found.state.now_us - session.events[0].event.now_us) / 1e6 if num_events else 0.0
    lines = [
        f"{num_events} of {len(session.events)} events in {seconds:.1f} s, recorded by pagedjax {session.version}",
        f"requests {found.events['Arrived']} ({found.num_refused} refused), steps {found.num_steps}, "
        f"failed steps {found.events['StepFailed']}, aborts {found.events['Aborted']}",
        "preemptions "
        + (", ".join(f"{count} for {why}" for why, count in sorted(found.preemptions.items())) or "none"),
        found.difference or "every effect is as recorded",
    ]
    return "\n  ".join(lines)


def show(state: State, html: str | None) -> None:
    """The queues and blocks of one state; drawn, to a file, if `html` names one."""
    pool = state.pool
    print(f"  blocks: {len(pool.counts)} held, {len(pool.idle)} cached, {len(pool.clean)} clean of {pool.num_blocks}")
    print(f"  running {len(state.running)}, waiting {len(state.waiting)}, steps in flight {len(state.in_flight)}")
    for one in state.running:
        print(f"    {one.sequence_id}: {one.phase}, {one.num_tokens} tokens, {len(one.blocks)} blocks")
    if html is not None:
        try:
            Path(html).write_text(f"<!doctype html><meta charset='utf-8'>{state_html(state)}", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {html}: {error.strerror}; set --html") from error


def compare(session: Session, settings: Sequence[str], cost: str) -> None:
    """The session's requests on the simulator: under its own configuration and under another."""
    requests = arrivals(session)
    changed = with_settings(session.config, settings)
    size = session.config.block_size
    if changed.block_size != size:
        raise ConfigError(f"the recorded prompts are named in blocks of {size} tokens; leave block_size at that")
    print(f"  what if, on the cost model {cost}:")
    for name, config in (("as recorded", session.config), (" ".join(settings), changed)):
        print(f"    {name}: {_figures(simulate(config, requests, PRESETS[cost]))}")


def _figures(report: SimReport) -> str:
    ttft, e2e = report.ttft_ms(), report.e2e_ms()
    if ttft is None or e2e is None:
        return f"none of {len(report.outcomes)} requests finished"
    return (
        f"{len(report.finished)} of {len(report.outcomes)} requests finished, {report.output_tokens_per_s:.1f} output "
        f"tok/s, TTFT p50 {ttft.p50:.0f} p99 {ttft.p99:.0f} ms, E2E p50 {e2e.p50:.0f} p99 {e2e.p99:.0f} ms, "
        f"{len(report.preemptions)} preemptions"
    )


def arrivals(session: Session) -> list[SimRequest]:
    """The requests of a session for the simulator: each as long as it became. (Beams' children are left out, and every
    token is sampled there.)"""
    accepted: Counter[int] = Counter()
    for _, event, _ in session.events:
        if isinstance(event, StepDone):
            for row in event.results:
                accepted[row.sequence_id] += row.num_accepted
    found: list[SimRequest] = []
    places: dict[int, int] = {}
    start_us = session.events[0].event.now_us if session.events else 0
    for _, event, _ in session.events:
        if not isinstance(event, Arrived):
            continue
        request = event.request
        parent = places.get(request.fork_of) if request.fork_of is not None else None
        places[request.sequence_id] = len(found)
        found.append(
            SimRequest(
                event.now_us - start_us,
                request.prompt_len,
                max(1, accepted[request.sequence_id]),
                max(request.max_tokens, accepted[request.sequence_id]),
                request.priority,
                request.tenant,
                request.preemptible,
                block_names=event.block_hashes,
                sample_index=0 if parent is None else len(found) - parent,
            )
        )
    return found


def with_settings(config: SchedulerConfig, settings: Iterable[str]) -> SchedulerConfig:
    """The configuration with `name=value` settings (values as in TOML; bare words are text).

    Raises ConfigError, by name, for what is unknown or out of range.
    """
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or name not in SchedulerConfig.__dataclass_fields__:
            raise ConfigError(f"{setting!r} is not name=value with a field of the scheduler; set --what-if")
        try:
            changes[name] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            changes[name] = value.strip()
    try:
        return replace(config, **changes)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{' '.join(settings)}: {error}; set --what-if") from error
