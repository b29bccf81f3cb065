"""Recordings: what is read back is what was told, and it replays bit for bit, in any process."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from pagedjax.cli.replay import arrivals, replay, with_settings
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Preempt
from pagedjax.core.errors import ConfigError, SchedulerError
from pagedjax.core.events import Aborted, ConfigChanged, StepDone, StepDue, StepFailed, TenantChanged
from pagedjax.core.scheduler import init, update
from pagedjax.engine.record import Recorder, digest, read
from pagedjax.simulator import H200_LIKE, SimRequest, simulate

CONFIG = SchedulerConfig(
    num_blocks=24,
    num_host_blocks=8,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=256,
    preemption_method="swap",
    tenant_weights={"gold": 3, "bronze": 1},
)
REQUESTS = [
    SimRequest(i * 2000, 40 + i, 30, priority=i % 3 - 1, tenant=("gold", "bronze")[i % 2], prefix="p", prefix_len=32)
    for i in range(12)
]


def events():
    """Swaps, preemptions, an abort, a failed step and changed configurations."""
    seen = []
    report = simulate(CONFIG, REQUESTS, H200_LIKE, observe=lambda before, event, after, effects: seen.append(event))
    assert report.preemptions and report.transfers
    end_us = seen[-1].now_us
    changes = [
        TenantChanged((("gold", 1),), end_us),
        ConfigChanged(replace(CONFIG, time_slice=7), end_us),
        Aborted(99, end_us),
        StepDue(end_us + 1),
    ]
    return [*seen, *changes]


def begun(path):
    recorder = Recorder(path)
    recorder.begin(CONFIG)
    return recorder


def record(path, sequence=None):
    told = begun(path).watch(update)
    state, effects = init(CONFIG), []
    for event in sequence or events():
        state, new = told(state, event)
        effects.append(new)
    return state, effects


def test_a_recording_holds_the_events_and_replays_to_the_same_state(tmp_path):
    state, effects = record(tmp_path / "r")
    (session,) = read(tmp_path / "r")
    assert [one.event for one in session.events] == events()
    assert session.config == CONFIG
    found = replay(session)
    assert found.difference is None
    assert found.state == state
    assert found.preemptions.total() == sum(isinstance(effect, Preempt) for new in effects for effect in new)


def test_any_event_is_a_snapshot(tmp_path):
    record(tmp_path / "r")
    (session,) = read(tmp_path / "r")
    state = init(CONFIG)
    for event in events()[:40]:
        state, _ = update(state, event)
    assert replay(session, 40).state == state
    with pytest.raises(ConfigError, match="--at"):
        replay(session, len(session.events) + 1)


def test_a_scheduler_that_would_do_otherwise_is_found_out_at_the_first_event(tmp_path):
    record(tmp_path / "r")
    (session,) = read(tmp_path / "r")
    other = replay(session._replace(config=replace(CONFIG, max_num_batched_tokens=32)))
    assert "StepDue was answered by" in other.difference


def test_a_failed_step_and_an_error_are_recorded_too(tmp_path):
    arrived = events()[:2]
    record(tmp_path / "r", [*arrived, StepFailed(0, (), arrived[-1].now_us + 1)])
    told = begun(tmp_path / "r").watch(update)
    with pytest.raises(SchedulerError):
        told(init(CONFIG), StepDone(7, (), 1))
    failed, broken = read(tmp_path / "r")
    assert replay(failed).events["StepFailed"] == 1
    assert broken.events[0].digest == "raised SchedulerError"
    assert replay(broken).difference is None


def test_a_recording_cut_short_by_a_crash_is_read_to_its_last_whole_line(tmp_path):
    record(tmp_path / "r")
    whole = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(whole[:-20])
    (session,) = read(tmp_path / "r")
    assert len(session.events) == len(events()) - 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no recording"),
        ('["StepDue", {"now_us": 1}, "x"]\n', "line 1"),
        ('{"pagedjax": "1", "config": {"num_bricks": 1}}\n', "num_bricks"),
        ('{"pagedjax": "1", "config": {}}\n["Nonsense", {}, ""]\n', "line 2"),
        ("garbage\n", "line 1"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_line(tmp_path, text, reason):
    (tmp_path / "r").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        list(read(tmp_path / "r"))


def test_a_recording_that_cannot_be_opened_names_the_flag(tmp_path):
    with pytest.raises(ConfigError, match="--record"):
        Recorder(tmp_path / "missing" / "r")


def test_a_full_disk_ends_the_recording_and_nothing_else(caplog):
    from pathlib import Path

    told = begun(Path("/dev/full")).watch(update)
    state, effects = told(init(CONFIG), StepDue(1))
    assert (state, effects) == update(init(CONFIG), StepDue(1))
    assert "recording_ended" in caplog.text


def test_the_digest_sees_block_tables(tmp_path):
    _, effects = record(tmp_path / "r")
    (step,) = next(new for new in effects if len(new) == 1 and type(new[0]).__name__ == "RunStep")
    row = step.plan.rows[0]
    moved = replace(step.plan, rows=(row._replace(blocks=row.blocks[::-1]), *step.plan.rows[1:]))
    assert len(row.blocks) > 1
    assert digest((step._replace(plan=moved),)) != digest((step,))


def test_requests_keep_their_lengths_for_the_simulator(tmp_path):
    record(tmp_path / "r")
    (session,) = read(tmp_path / "r")
    found = arrivals(session)
    assert [(r.prompt_len, r.output_len, r.priority, r.tenant) for r in found] == [
        (r.prompt_len, r.output_len, r.priority, r.tenant) for r in REQUESTS
    ]
    before, after = (
        simulate(c, found, H200_LIKE) for c in (CONFIG, with_settings(CONFIG, ["enable-preemption=false"]))
    )
    assert before.preemptions and not after.preemptions


@pytest.mark.parametrize("setting", ["num_bricks=1", "num_blocks", "num_blocks=-1", "preemption_mode=kind"])
def test_a_setting_that_means_nothing_is_refused(setting):
    with pytest.raises(ConfigError):
        with_settings(CONFIG, [setting])


def test_the_command_replays_in_another_process(tmp_path):
    record(tmp_path / "r")
    command = [sys.executable, "-m", "pagedjax", "replay", str(tmp_path / "r"), "--at", "30"]
    command += ["--html", str(tmp_path / "state.html"), "--what-if", "time_slice=5", "--cost", "h200-like"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "every effect is as recorded" in done.stdout
    assert "time_slice=5: 12 of 12 requests finished" in done.stdout
    assert "<svg" in (tmp_path / "state.html").read_text()


def test_the_command_fails_on_a_difference_and_on_garbage(tmp_path):
    from pagedjax.cli import run

    record(tmp_path / "r")
    lines = (tmp_path / "r").read_text().splitlines()
    lines[5] = lines[5][:-6] + 'dead"]'
    (tmp_path / "r").write_text("\n".join(lines) + "\n")
    assert run(["replay", str(tmp_path / "r")]) == 1
    assert run(["replay", str(tmp_path / "nothing")]) == 2
    record(tmp_path / "whole")
    assert run(["replay", str(tmp_path / "whole"), "--what-if", "block_size=64"]) == 2
    assert run(["replay", str(tmp_path / "r"), "--cost", "cpu-xla"]) == 2


@pytest.mark.parametrize("at", ["-1", "100000"])
def test_an_event_that_is_not_in_the_recording_is_refused_with_those_that_are(tmp_path, capsys, at):
    from pagedjax.cli import run

    record(tmp_path / "r")
    (session,) = read(tmp_path / "r")
    assert run(["replay", str(tmp_path / "r"), "--at", at]) == 2
    assert f"set --at to 0..{len(session.events)}, not {at}" in capsys.readouterr().err
