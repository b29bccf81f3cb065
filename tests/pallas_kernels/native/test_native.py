"""The library of native kernels: its pool of threads, its build, and what is said where it can't be used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import native
from pallas_kernels.native import build, threads

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="there is no C++ compiler")


def in_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, cwd=HERE.parents[2]
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REASON = "from pallas_kernels import native; print(native.unavailable())"


@pytest.fixture(scope="session")
def pool_driver(tmp_path_factory) -> Path:
    return driver_of(tmp_path_factory.mktemp("pool") / "driver", HERE / "pool_driver.cc", build.FOLDER / "pool.cc")


def driver_of(driver: Path, *sources: Path) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-pthread", f"-I{build.FOLDER}", *sources, "-o", str(driver)], check=True
    )
    return driver


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_item_runs_once_whoever_calls_at_the_same_time(pool_driver, num_threads):
    done = subprocess.run([pool_driver, str(num_threads)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0 faults\n")


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads have no affinity here")
def test_a_worker_is_sent_away_from_its_callers_cpu_alone(tmp_path):
    driver = driver_of(tmp_path / "driver", HERE / "seat_driver.cc")
    done = subprocess.run([driver], capture_output=True, text=True, timeout=60)
    num_cpus = len(os.sched_getaffinity(0))
    assert [int(word) for word in done.stdout.split()] == [num_cpus, num_cpus, max(num_cpus - 1, 1), num_cpus]
    assert (done.returncode == 0) == (num_cpus > 1)


def test_off_is_a_reason():
    assert in_process(REASON, PAGEDJAX_NATIVE="off") == "PAGEDJAX_NATIVE is off"


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("PAGEDJAX_NATIVE", "avx3", "PAGEDJAX_NATIVE=avx3 is none of off, plain"),
        ("PAGEDJAX_NUM_THREADS", "0", "PAGEDJAX_NUM_THREADS=0 is not a number from 1 to 1024"),
        ("PAGEDJAX_NUM_THREADS", "two", "PAGEDJAX_NUM_THREADS=two is not a number"),
    ],
)
def test_a_variable_that_means_nothing_is_refused_by_name(name, value, complaint):
    if name == "PAGEDJAX_NUM_THREADS":
        call = "from pallas_kernels.native import threads; threads.usable_cpus()"
    else:
        call = "from pallas_kernels import native; native.load()"
    done = subprocess.run(
        [sys.executable, "-c", call],
        capture_output=True,
        text=True,
        env=os.environ | {name: value},
        cwd=HERE.parents[2],
    )
    assert complaint in done.stderr


def test_a_missing_library_is_a_reason_that_says_what_to_do():
    code = f"from pathlib import Path; from pallas_kernels import native; native.LIBRARY = Path('gone'); {REASON}"
    assert "python -m pallas_kernels.native" in in_process(code, PAGEDJAX_NATIVE="")


@needs_compiler
def test_a_library_of_other_sources_is_refused():
    if native.unavailable():
        pytest.skip(f"no library here: {native.unavailable()}")
    code = f"from pallas_kernels import native; native.source_hash = lambda: 'other'; {REASON}"
    assert "was built from other sources" in in_process(code, PAGEDJAX_NATIVE="")


@needs_compiler
def test_a_library_for_a_newer_jaxlib_is_refused():
    if native.unavailable():
        pytest.skip(f"no library here: {native.unavailable()}")
    code = f"from pallas_kernels import native; native._ffi_version = lambda: 1; {REASON}"
    assert "was built for a newer jaxlib" in in_process(code, PAGEDJAX_NATIVE="")


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_a_compiler_that_fails_ends_the_build_with_one_line(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.BuildError) as raised:
        build.build(tmp_path / "library.so")
    assert compiler in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_compiler_at_all_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="there is no C\\+\\+ compiler"):
        build.build(tmp_path / "library.so")


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/", {".": "250000 100000"}, 3),
        ("0::/a/b", {"a": "150000 100000", "a/b": "max 100000"}, 2),
        ("0::/a", {"a": "50000 100000"}, 1),
        ("0::/", {}, threads.NO_LIMIT),
        ("7:cpu:/a", {".": "100000 100000"}, threads.NO_LIMIT),
    ],
)
def test_a_container_s_share_of_cpu_time_bounds_the_threads(tmp_path, own, limits, expected):
    groups = tmp_path / "groups"
    for name, limit in limits.items():
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / "cpu.max").write_text(limit + "\n")
    (tmp_path / "own").write_text(own + "\n")
    assert threads.cpu_quota(groups, tmp_path / "own") == expected


@pytest.mark.parametrize("kind", ["bfloat16", "bytes"])
def test_the_peak_counts_what_every_thread_multiplies(level, kind):
    ticks = iter((0.0, 2.0))
    rate = native.peak_rate(kind, num_turns=10, clock=lambda: next(ticks))
    per_turn = 12 * 16 * (2 if kind == "bfloat16" else 4) * 2
    assert rate == native.load().num_threads * 10 * per_turn / 2.0
