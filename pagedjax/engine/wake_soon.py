"""Have Linux run a thread soon after it wakes, beside threads that compute.

Kernels keep every core busy, and a thread that wakes there waits until the time slice of who runs is over, some 3 ms:
as long as a decode step. The step loop sleeps most of each step and then has to prepare the next one within it. A
thread that asks for short slices of its own is let in at once (Linux 6.12, `sched_setattr(2)`); its share of time stays
the same.
"""

import ctypes
import os
import platform
import sys

SLICE_US = 100  # the least that the kernel takes
# sched_setattr's number, which has no function in most C libraries yet.
_SYSCALLS = {"x86_64": 314, "aarch64": 274}


class Attributes(ctypes.Structure):
    """struct sched_attr, version 0."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def wake_soon() -> bool:
    """Ask for short slices for the calling thread; whether the system took the wish. Elsewhere, and for a thread whose
    policy somebody has chosen, nothing changes."""
    number = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    size, nice = ctypes.sizeof(Attributes), os.getpriority(os.PRIO_PROCESS, 0)
    wish = Attributes(size, os.SCHED_OTHER, 0, nice, 0, SLICE_US * 1000)
    done: int = ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wish), 0)
    return done == 0
