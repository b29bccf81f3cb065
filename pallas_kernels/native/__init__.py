"""Native CPU kernels: a shared library of XLA FFI handlers, loaded when first needed.

`unavailable()` says in one line why there is none here; everything then runs on XLA. `load()` gives the library with
its handlers registered under the names in `TARGETS`, for platform "cpu". Two variables of the environment:

    PAGEDJAX_NATIVE=off|plain|avx2|avx512|avx512_bf16    at most this level of instructions (default: the best there is)
    PAGEDJAX_NUM_THREADS=N                               threads of the kernels (default: the CPUs this process may use)
"""

import ctypes
import functools
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from pallas_kernels.native.build import LIBRARY, source_hash
from pallas_kernels.native.threads import usable_cpus

LEVELS = ("plain", "avx2", "avx512", "avx512_bf16")  # the order of levels.h
# FFI targets; the library's symbols have the same names
TARGETS = (
    *("pagedjax_linear", "pagedjax_argmax", "pagedjax_take_rows"),
    *("pagedjax_ragged_attention", "pagedjax_untouched"),
)
REBUILD = "`python -m pallas_kernels.native` builds it"


class NativeUnavailable(NotImplementedError):
    """Why the native kernels cannot be used here, in one line."""


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded library: the level of instructions it began with, all that run here, the threads of its pool."""

    level: str
    levels: tuple[str, ...]
    num_threads: int

    @property
    def best_level(self) -> str:
        return self.levels[-1]


def unavailable() -> str | None:
    """Why `load` would raise NativeUnavailable, or None. Raises ValueError as `load` does."""
    try:
        load()
    except NativeUnavailable as error:
        return str(error)
    return None


def load() -> NativeLibrary:
    """The library, loaded and registered once a process.

    Raises NativeUnavailable where it cannot be used, and ValueError for a variable of the environment with a value
    that means nothing here.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise NativeUnavailable(loaded)
    return loaded


def use_level(level: str) -> None:
    """From now on all kernels of the process run at `level`, one of LEVELS up to the best: for tests and benchmarks."""
    library = load()
    if level not in library.levels:
        raise ValueError(f"no level {level!r} here; known: {', '.join(library.levels)}")
    ctypes.CDLL(str(LIBRARY)).pagedjax_configure(LEVELS.index(level), library.num_threads)


def peak_rate(
    kind: Literal["bfloat16", "bytes"], num_turns: int = 1 << 21, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Multiplications and additions a second of all threads on registers alone: what no product can pass."""
    load()
    library = ctypes.CDLL(str(LIBRARY))
    library.pagedjax_multiply_in_registers.restype = ctypes.c_double
    began = clock()
    total = library.pagedjax_multiply_in_registers(ctypes.c_bool(kind == "bytes"), ctypes.c_long(num_turns))
    return float(total) / (clock() - began)


@functools.cache
def _load() -> NativeLibrary | str:
    wish = os.environ.get("PAGEDJAX_NATIVE") or None
    if wish == "off":
        return "PAGEDJAX_NATIVE is off"
    if wish is not None and wish not in LEVELS:
        raise ValueError(f"PAGEDJAX_NATIVE={wish} is none of off, {', '.join(LEVELS)}")
    if jax.default_backend() != "cpu":
        return f"they run on CPUs, not on {jax.default_backend()}"
    if not LIBRARY.exists():
        return f"the library was not built, which takes a C++ compiler; {REBUILD}, or says what fails"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"the library cannot be loaded ({error}); {REBUILD} anew"
    return _refusal(library) or _configure(library, wish)


def _refusal(library: ctypes.CDLL) -> str | None:
    library.pagedjax_source_hash.restype = ctypes.c_char_p
    if library.pagedjax_source_hash().decode() != source_hash():
        return f"the library was built from other sources; {REBUILD} anew"
    # XLA runs handlers of older versions, for a year at least, and cannot run newer ones.
    built, runs = library.pagedjax_ffi_version(), _ffi_version()
    if built > runs:
        return f"the library was built for a newer jaxlib (FFI {built} against {runs}); {REBUILD} for this one"
    return None


def _ffi_version() -> int:
    """1000 * major + minor of the interface of the installed jaxlib, which Python can't ask for."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    return 1000 * int(major[1]) + int(minor[1]) if major and minor else 0


def _configure(library: ctypes.CDLL, wish: str | None) -> NativeLibrary | str:
    levels = LEVELS[: library.pagedjax_best_level() + 1]
    level = wish or levels[-1]
    if level not in levels:
        raise ValueError(f"PAGEDJAX_NATIVE={level}: the best level of this machine and library is {levels[-1]}")
    num_threads = usable_cpus()
    library.pagedjax_configure(LEVELS.index(level), num_threads)
    try:
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except Exception as error:  # whatever XLA raises: its own types differ between versions
        return f"XLA refused the library: {error}"
    return NativeLibrary(level, levels, num_threads)
