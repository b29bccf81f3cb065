"""Where the engine runs: in the server's process or in one of its own."""

import os
from typing import Literal

EngineProcess = Literal["auto", "on", "off"]


def has_own_process(choice: EngineProcess) -> bool:
    """Whether the engine gets a process: auto gives it one where there is a core for it beside the server's.

    Measured on two cores of a busy machine, with SmolLM2 135M in 4 bits and interleaved rounds of `bench serve`: one
    request at a time 51 to 64 tokens a second in its own process and 36 to 47 on a thread, a burst of 64 requests 69 to
    70 and 60 to 70. Beside a GPU, whose steps are shorter, Python's share of them is larger still.
    """
    return num_cores() > 1 if choice == "auto" else choice == "on"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
