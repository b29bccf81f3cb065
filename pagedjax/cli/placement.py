"""Where the engine runs: in the server's process or in one of its own."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

EngineProcess = Literal["auto", "on", "off"]
_GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def has_own_process(choice: EngineProcess) -> bool:
    """Whether the engine gets a process: auto gives it one beside a GPU, whose steps wait for Python.

    On a CPU the engine's own threads need every core, and a second interpreter takes one of them from it.
    """
    return expects_gpu() if choice == "auto" else choice == "on"


def expects_gpu() -> bool:
    """Whether JAX will find a GPU, as far as that shows without starting it, which would take the device's memory."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0].strip() != "cpu"
    return any(map(find_spec, _GPU_PLUGINS)) and any(device.exists() for device in _GPU_DEVICES)
