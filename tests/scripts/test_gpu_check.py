"""The check for GPUs runs to its end without one, loses nothing to a crash or a hang, and tells what is wrong."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import part, report
from scripts.gpu_check.checks import Check, Refused, Skipped

ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as the script does: JAX's own kernels are such
@pytest.mark.parametrize("name", part.PARTS)
def test_every_check_of_a_part_runs_on_a_stand_in_and_none_fails(name):
    checks = importlib.import_module(f"scripts.gpu_check.{name}").checks(stand_in=True)
    found = [json.loads(json.dumps(part.outcome(check))) for check in checks]
    assert [result for result in found if result["status"] not in ("ok", "refused", "skipped")] == []
    is_peer = name.startswith("torch")  # not installed here
    assert is_peer or any(result["status"] == "ok" for result in found)


def test_the_script_gives_a_part_a_process_and_writes_its_results(tmp_path):
    command = [sys.executable, "-m", "scripts.gpu_check", "--stand-in", "--out", str(tmp_path), "--part", "host_copies"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert found["stand_in"]
    assert {result["part"] for result in found["results"]} == {"host_copies"}
    assert done.stdout.rstrip().splitlines()[-1].split()[1].rstrip(",") in ("ok", "refused", "skipped")


def raises(error):
    def run():
        raise error

    return Check("it", run)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Refused("not here"), "refused"),
        (Skipped("no file"), "skipped"),
        (AssertionError("error 0.3"), "failed"),
        (RuntimeError("out of memory"), "failed"),
    ],
)
def test_whatever_a_check_raises_is_a_result(error, status):
    found = part.outcome(raises(error))
    assert found["status"] == status
    assert str(error) in found["reason"]


def fake_part(monkeypatch, script):
    """Parts run `script` instead, with `results` (the file) and `skip` to go by."""
    head = "import json, sys, time\nresults, skip = sys.argv[4], int(sys.argv[6])\n"
    head += "def say(**line):\n    print(json.dumps(line), file=open(results, 'a'))\n"
    popen = subprocess.Popen
    monkeypatch.setattr(
        gpu_check.subprocess,
        "Popen",
        lambda command, **options: popen([sys.executable, "-c", head + script, *command[2:]], **options),
    )


def run_fake(limit_s=60):
    return list(gpu_check.run_part("parity", stand_in=True, deadline=gpu_check.time.monotonic() + limit_s))


def test_a_check_that_hangs_is_killed_and_the_others_run(monkeypatch):
    fake_part(
        monkeypatch,
        """
if skip == 0:
    say(began="one", limit_s=5); say(part="parity", name="one", status="ok", figures={})
    say(began="two", limit_s=0.3); time.sleep(60)
say(began="three", limit_s=5); say(part="parity", name="three", status="ok", figures={})
""",
    )
    found = run_fake()
    assert [(result["name"], result["status"]) for result in found] == [("one", "ok"), ("two", "hung"), ("three", "ok")]


def test_a_crash_loses_one_check_and_is_told_with_its_last_words(monkeypatch):
    fake_part(
        monkeypatch,
        """
if skip == 0:
    say(began="one", limit_s=5); sys.exit("illegal address")
say(began="two", limit_s=5); say(part="parity", name="two", status="ok", figures={})
""",
    )
    first, second = run_fake()
    assert (first["name"], first["status"], second["status"]) == ("one", "crashed", "ok")
    assert "illegal address" in first["reason"]


def test_a_part_that_cannot_start_is_not_tried_for_ever(monkeypatch):
    fake_part(monkeypatch, "raise ImportError('no jax')")
    (only,) = run_fake()
    assert (only["name"], only["status"]) == ("its start", "crashed")
    assert "no jax" in only["reason"]


def test_when_time_is_over_what_was_not_tried_is_told(monkeypatch):
    fake_part(monkeypatch, "say(began='one', limit_s=50); time.sleep(60)")
    hung, rest = run_fake(limit_s=0.5)
    assert (hung["status"], rest["status"]) == ("hung", "out of time")
    assert set(gpu_check.BAD) >= {hung["status"], rest["status"]}


def test_parts_that_take_all_their_time_leave_some_for_the_others():
    left_s, taken_s = 470.0, []
    for i in range(len(part.PARTS)):
        taken_s.append(gpu_check.share_s(left_s, len(part.PARTS) - i - 1))
        left_s -= min(taken_s[-1], 200.0)
    assert min(taken_s) >= gpu_check.KEPT_S and left_s >= 0
    assert gpu_check.share_s(10.0, 4) == 2.0


def test_a_process_that_cannot_be_ended_is_left_behind(monkeypatch):
    stuck = []
    monkeypatch.setattr(gpu_check, "KILL_S", 0.1)
    monkeypatch.setattr(gpu_check.subprocess.Popen, "kill", lambda process: stuck.append(process))
    fake_part(monkeypatch, "say(began='one', limit_s=0.2); time.sleep(60)")
    first, *_ = run_fake(limit_s=1)
    for process in stuck:
        process.terminate()
        process.wait()
    assert first["status"] == "hung"


def test_the_table_has_figures_failures_and_counts():
    results = [
        {"part": "parity", "name": "a", "status": "ok", "figures": {"error": 0.01}},
        {"part": "kernels", "name": "decode", "status": "ok", "figures": {"TB/s": 3.14159}},
        {"part": "engine", "name": "swap", "status": "failed", "reason": "ValueError: no"},
        {"part": "goldens", "name": "b", "status": "skipped", "reason": "no file"},
    ]
    text = report.table(results)
    for words in ("1 cases agree", "1.0e-02", "TB/s 3.142", "failed   engine: swap: ValueError: no", "2 ok, 1 failed"):
        assert words in text
    assert "no file" not in text
