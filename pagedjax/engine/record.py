"""What the scheduler was told and what it answered, on disk, so that an incident can be replayed bit for bit.

A recording is lines of JSON. A line with `config` begins a session: a state made by `init`. Every other line is one
event, `[kind, fields, digest]`: the digest is of the effects that it had, or the error that it raised. There are
lengths, block numbers and hashes in it; no text, no token ids, no keys. Recordings of one file follow each other.
"""

import logging
import os
import weakref
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import orjson

from pagedjax import __version__
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Effect, RunStep
from pagedjax.core.errors import ConfigError
from pagedjax.core.events import Event
from pagedjax.core.state import State

logger = logging.getLogger(__name__)

Update = Callable[[State, Event], tuple[State, tuple[Effect, ...]]]
KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}


class Recorder:
    """Writes a session at the end of `path`. A disk that fails ends the recording, not what is recorded.

    The file is opened before a model is loaded, since it may be refused; `begin` comes when the configuration is known.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file: int | None = os.open(path, flags, mode=0o600)
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror}; set --record") from error
        weakref.finalize(self, os.close, self._file)

    def begin(self, config: SchedulerConfig) -> None:
        """Begin a session: a state made by `init` of `config`."""
        self._write({"pagedjax": __version__, "config": asdict(config)})

    def watch(self, update: Update) -> Update:
        """`update`, which also writes down what goes in and a digest of what comes out."""

        def recorded(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
            try:
                new, effects = update(state, event)
            except Exception as error:
                self._write([type(event).__name__, event, f"raised {type(error).__name__}"])
                raise
            self._write([type(event).__name__, event, digest(effects)])
            return new, effects

        return recorded

    def _write(self, line: Any) -> None:
        if self._file is None:
            return
        data = orjson.dumps(line, default=_plain, option=orjson.OPT_APPEND_NEWLINE)
        try:
            # One write a line: what was told before a crash is on disk, whole.
            if os.write(self._file, data) == len(data):
                return
            reason = "no room"
        except OSError as error:
            reason = error.strerror or str(error)
        logger.error('event=recording_ended reason="%s"', reason)
        self._file = None


def digest(effects: tuple[Effect, ...]) -> str:
    """16 hexadecimal digits; equal for equal effects, in any process."""
    hashed = blake2b(digest_size=8)
    for effect in effects:
        if isinstance(effect, RunStep):
            # Block tables are long, and everything else is short.
            plan = effect.plan
            hashed.update(repr((plan.plan_id, plan.scatters, [row._replace(blocks=()) for row in plan.rows])).encode())
            for row in plan.rows:
                hashed.update(array("q", row.blocks).tobytes())
        else:
            hashed.update(repr(effect).encode())
    return hashed.hexdigest()


class Recorded(NamedTuple):
    """One event of a session, the `digest` of its effects, and the number of its line."""

    line: int
    event: Event
    digest: str


class Session(NamedTuple):
    version: str
    config: SchedulerConfig
    events: tuple[Recorded, ...]


def read(path: Path) -> Iterator[Session]:
    """The sessions of a recording, in order. A last line that a crash cut short is left out.

    Raises ConfigError, with the number of the line, for what is no recording.
    """
    header: dict[str, Any] | None = None
    events: list[Recorded] = []
    for number, line, is_last in _lines(path):
        try:
            found = orjson.loads(line)
            if isinstance(found, dict):
                if header is not None:
                    yield _session(header, events)
                header, events = found, []
            elif header is None:
                raise ValueError("an event comes before any configuration")
            else:
                kind, value, answer = found
                events.append(Recorded(number, _revive(KINDS[kind], value), str(answer)))
        except (ValueError, TypeError, KeyError) as error:
            if is_last and not line.endswith(b"\n"):
                break
            raise ConfigError(f"{path}, line {number}, is not of a recording: {error}") from error
    if header is None:
        raise ConfigError(f"{path} holds no recording")
    yield _session(header, events)


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    try:
        with path.open("rb") as file:
            lines = list(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        yield number, line, number == len(lines)


def _session(header: dict[str, Any], events: list[Recorded]) -> Session:
    try:
        return Session(str(header["pagedjax"]), _revive(SchedulerConfig, header["config"]), tuple(events))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"a recording of another version: {error}") from error


def _plain(value: Any) -> Any:
    """For what orjson does not know: named tuples as lists, hashes in hexadecimal."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"a recording cannot hold a {type(value).__name__}")


def _revive(kind: Any, value: Any) -> Any:
    """The value of type `kind` that was written as `value`."""
    if get_origin(kind) in (Union, UnionType):
        known = [one for one in get_args(kind) if one is not type(None)]
        return None if value is None else _revive(known[0], value) if len(known) == 1 else value
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        kinds = [parts[0]] * len(value) if parts[1:] == (...,) else parts
        return tuple([_revive(one, part) for one, part in zip(kinds, value, strict=True)])
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        unknown = set(value) - {field.name for field in fields(kind)}
        if unknown:
            raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        return kind(**{name: _revive(hints[name], part) for name, part in value.items()})
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = _hints(kind)
        return kind(*[_revive(hints[name], part) for name, part in zip(kind._fields, value)])
    if kind is bytes:
        return bytes.fromhex(value)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    return value


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind)
    return _HINTS[kind]
