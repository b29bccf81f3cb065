"""Compilations of this process counted, and the persistent compilation cache switched on."""

import hashlib
import itertools
import platform
from pathlib import Path

import jax

from pagedjax.core.errors import ConfigError

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_counter = itertools.count()
_num_compiles = 0
_is_listening = False


def num_compiles() -> int:
    """Programs compiled (or taken from the persistent cache) since the first call, by any thread."""
    _listen()
    return _num_compiles


def use_persistent_cache(directory: str | Path) -> Path:
    """Keep compiled programs under `directory`, apart for each kind of CPU: a program made for another one may use
    instructions that this one lacks. Gives the folder. A setting of the process. Raises ConfigError if it cannot be."""
    folder = Path(directory) / _cpu_kind()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot keep compiled programs in {folder}: {error.strerror}; set --compilation-cache-dir"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def _listen() -> None:
    global _is_listening
    if not _is_listening:
        _is_listening = True
        jax.monitoring.register_event_duration_secs_listener(_count)


def _count(event: str, duration_secs: float, **kwargs: object) -> None:
    global _num_compiles
    if event == _COMPILE_EVENT:
        _num_compiles = next(_counter) + 1  # the counter is atomic where += is not


def _cpu_kind() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kind = "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        kind = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(kind.encode()).hexdigest()[:12]}"
