"""The step loop asks Linux for short time slices, and for nothing else."""

import ctypes
import os
import platform
import sys
import threading

import pytest

from pagedjax.engine import wake_soon as module
from pagedjax.engine.wake_soon import SLICE_US, Attributes, wake_soon

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in module._SYSCALLS, reason="threads have no such attributes here"
)


def attributes() -> Attributes:
    """Those of the calling thread, by sched_getattr."""
    number = module._SYSCALLS[platform.machine()] + 1
    found = Attributes()
    assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(found), ctypes.sizeof(found), 0) == 0
    return found


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_policy_and_niceness_stay_and_only_the_slice_is_short():
    def ask():
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        return wake_soon(), attributes()

    taken, found = in_a_thread(ask)
    if not taken:
        pytest.skip("this system does not let threads ask")
    assert (found.policy, found.nice) == (os.SCHED_OTHER, 3)
    # Kernels before 6.12 take the wish and keep no slice.
    assert found.runtime_ns in (0, SLICE_US * 1000)


def test_a_policy_that_somebody_chose_stays():
    def ask():
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return wake_soon(), os.sched_getscheduler(0)

    assert in_a_thread(ask) == (False, os.SCHED_BATCH)


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(module.platform, "machine", lambda: "riscv64")
    assert not wake_soon()
