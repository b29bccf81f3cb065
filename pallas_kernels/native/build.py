"""Compile the native kernels with the machine's C++ compiler, for setup.py and `python -m pallas_kernels.native`.

No package is imported here. The interface to XLA is a set of headers inside jaxlib; the compiler is $CXX, or the first
of c++, g++ and clang++ that is there. Objects are kept by the hash of all that went into them.
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "_pagedjax_native.so"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-pthread")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# What levels.h calls them, in its order. `plain` is whatever the compiler takes for granted: SSE2, or NEON on Arm.
X86_LEVELS: Mapping[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
}


class BuildError(RuntimeError):
    """Why there is no library, in one line."""


def build(library: Path = LIBRARY, objects: Path | None = None, extra_flags: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Write `library`, keeping object files in the folder `objects`; gives the levels that it has.

    A level that the compiler does not know is left out. Raises BuildError.
    """
    if objects is None:
        with tempfile.TemporaryDirectory() as folder:
            return build(library, Path(folder), extra_flags)
    objects.mkdir(parents=True, exist_ok=True)
    command = [*_compiler(), *FLAGS, *extra_flags, f"-I{FOLDER}", "-isystem", str(headers())]
    _run([*_compiler(), "--version"])  # so that one that is not there is said as that
    levels = _known_levels(command)
    defines = [f"-DPAGEDJAX_HAS_{name.upper()}" for name in levels if name != "plain"]
    shared = [source for source in sorted(FOLDER.glob("*.cc")) if not source.stem.endswith("_isa")]
    jobs = [([*command, *defines], source) for source in shared]
    for name, flags in levels.items():
        jobs += [([*command, *flags, f"-DPAGEDJAX_LEVEL={name}"], source) for source in sorted(FOLDER.glob("*_isa.cc"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda job: _compile(*job, objects), jobs))
    _link([*_compiler(), *extra_flags, "-shared", "-pthread", *map(str, compiled)], library)
    return tuple(levels)


def source_hash() -> str:
    """Of all sources: a library with another one was built from others."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def headers() -> Path:
    """The folder of XLA's headers inside the installed jaxlib. Raises BuildError."""
    # Not jax.ffi.include_dir(): where packages are built there may be jaxlib alone.
    spec = importlib.util.find_spec("jaxlib")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / "include/xla/ffi/api/ffi.h").is_file():
            return Path(folder) / "include"
    raise BuildError("jaxlib, whose headers are needed, is not installed here")


def _sources() -> list[Path]:
    return sorted([*FOLDER.glob("*.cc"), *FOLDER.glob("*.h")])


def _compiler() -> list[str]:
    if wanted := os.environ.get("CXX"):
        return shlex.split(wanted)
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError("there is no C++ compiler (c++, g++ or clang++, or set CXX)")
    return [found]


def _known_levels(command: list[str]) -> dict[str, tuple[str, ...]]:
    levels: dict[str, tuple[str, ...]] = {"plain": ()}
    if platform.machine() not in ("x86_64", "AMD64"):
        return levels
    for name, flags in X86_LEVELS.items():
        probe = [*command, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
        if subprocess.run(probe, capture_output=True).returncode == 0:
            levels[name] = flags
    return levels


def _compile(command: list[str], source: Path, objects: Path) -> Path:
    if source.stem == "library":  # alone, lest every change recompile everything
        command = [*command, f'-DPAGEDJAX_SOURCE_HASH="{source_hash()}"']
    digest = hashlib.sha256("\0".join(command).encode() + source.read_bytes())
    for header in sorted(FOLDER.glob("*.h")):
        digest.update(header.read_bytes())
    target = objects / f"{source.stem}-{digest.hexdigest()[:16]}.o"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        _run([*command, "-c", str(source), "-o", str(partial)])
        partial.replace(target)
    return target


def _link(command: list[str], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # Replaced at once: a running process may have the old one mapped.
    partial = library.with_suffix(f".{os.getpid()}.tmp")
    _run([*command, "-o", str(partial)])
    partial.replace(library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit status {done.returncode}")
        raise BuildError(f"{shlex.join(command[:1])} failed: {said}")
