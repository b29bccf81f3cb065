"""A `pagedjax serve` of our own for the length of a run."""

import difflib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any

from pagedjax.core.errors import ConfigError
from pagedjax.engine.config import EngineConfig

_POLL_S = 0.2
_DRAIN_S = 15.0
_LOG_TAIL_LINES = 20


@contextmanager
def serving(model: str, options: Mapping[str, Any], startup_timeout_s: float) -> Iterator[tuple[str, int]]:
    """Start a server on a free loopback port; its address and process id once it is ready; stop it afterwards.

    Raises ConfigError, with the end of the server's output, when it does not come up.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "pagedjax", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile("w+b") as log, _terminate_on_sigterm():
        # A session of its own: Ctrl-C must reach the client alone, which still wants its last answers.
        process = subprocess.Popen(
            [*command, *flags(options)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            if not _wait_until_ready(process, url, startup_timeout_s):
                output = _tail(log)
                _check_known(options, output)
                raise ConfigError(f"{_why(process, startup_timeout_s)}; its output ends:\n{output}")
            yield url, process.pid
        finally:
            _stop(process)


def flags(options: Mapping[str, Any]) -> list[str]:
    """Engine options as command-line flags: booleans become --x or --no-x."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def free_port() -> int:
    """A loopback TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(url + "/ready", timeout=5):
            return True
        time.sleep(_POLL_S)
    return False


def _why(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    if process.returncode is not None:
        return f"the server ended with code {process.returncode} before it was ready"
    return f"the server was not ready after {timeout_s:g} s; raise --startup-timeout"


def _check_known(options: Mapping[str, Any], output: str) -> None:
    """Raise ConfigError for options that the server says it does not have; only it knows all of them."""
    _, refused, rest = output.partition("unrecognized arguments: ")
    words = rest.split()
    unknown = [name for name, value in options.items() if flags({name: value})[0] in words]
    if refused and unknown:
        close = difflib.get_close_matches(unknown[0], [field.name for field in fields(EngineConfig)], n=1)
        hint = f"; do you mean {close[0]}?" if close else ""
        raise ConfigError(f"--engine: pagedjax serve has no option {', '.join(unknown)}{hint} (pagedjax serve --help)")


def _tail(log: Any) -> str:
    log.seek(0)
    lines: Sequence[str] = log.read().decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_DRAIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _terminate_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the server does not outlive us."""

    def leave(_signal: int, _frame: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not on the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
