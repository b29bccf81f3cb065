"""Profiles of a running engine: for their time, one at a time, and a failure is told."""

import threading

import pytest

from pagedjax.core.errors import RequestError
from pagedjax.engine.outputs import EngineError
from pagedjax.engine.profiling import Profiler


class FakeProfiler:
    def __init__(self):
        self.directories, self.stopping, self.failure = [], threading.Event(), None

    def start(self, directory):
        if self.failure is not None:
            raise self.failure
        self.directories.append(directory)

    def stop(self):
        assert self.stopping.wait(30)


@pytest.fixture
def fake():
    return FakeProfiler()


@pytest.fixture
def profiler(fake):
    return Profiler(fake.start, fake.stop)


def test_it_is_done_when_it_is_written_and_then_the_next_may_begin(profiler, fake, wait_until):
    profiler.begin("a", 0.0)
    assert not profiler.is_done()
    with pytest.raises(RequestError, match="another profile"):
        profiler.begin("b", 0.0)
    fake.stopping.set()
    wait_until(profiler.is_done)
    profiler.begin("b", 0.0)
    wait_until(profiler.is_done)
    assert fake.directories == ["a", "b"]


def test_one_that_fails_is_told_once_and_the_next_may_begin(profiler, fake, wait_until):
    fake.failure = OSError("no room")
    fake.stopping.set()
    profiler.begin("a", 0.0)
    with pytest.raises(EngineError, match="no room"):
        wait_until(profiler.is_done)
    fake.failure = None
    profiler.begin("b", 0.0)
    wait_until(profiler.is_done)


@pytest.fixture
def wait_until():
    def wait(condition):
        for _ in range(3000):
            if condition():
                return
            threading.Event().wait(0.01)
        raise AssertionError("it did not happen in time")

    return wait


def test_jax_s_own_profile_is_written(tmp_path, wait_until):
    profiler = Profiler()
    profiler.begin(str(tmp_path), 0.05)
    wait_until(profiler.is_done)
    assert list(tmp_path.rglob("*.xplane.pb"))
