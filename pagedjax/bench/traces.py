"""Recorded arrivals: Azure's LLM inference traces (CSV) and Mooncake's (JSON lines).

Azure: Patel et al., "Splitwise", ISCA 2024. Mooncake: Qin et al., "Mooncake", FAST 2025.
"""

import csv
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TextIO

from pagedjax.core.errors import ConfigError

MOONCAKE_BLOCK_LEN = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Arrival(NamedTuple):
    """One recorded request, `time_s` seconds after the trace's first. Lengths are in tokens.

    `hash_ids` names each block of MOONCAKE_BLOCK_LEN prompt tokens, the last one partial; equal ids are equal blocks.
    """

    time_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] | None = None


def read_trace(path: Path, limit: int | None = None) -> tuple[Arrival, ...]:
    """The first `limit` arrivals of a trace, told apart by the suffix: .csv is Azure's, .jsonl is Mooncake's.

    Raises ConfigError, with the line, for a file that cannot be read as such.
    """
    readers: dict[str, Callable[[TextIO], Iterator[tuple[int, Arrival]]]] = {".csv": _azure, ".jsonl": _mooncake}
    if path.suffix not in readers:
        raise ConfigError(f"trace {path}: unknown format {path.suffix!r}; .csv (Azure) and .jsonl (Mooncake) are read")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            arrivals = [_checked(path, line, arrival) for line, arrival in islice(readers[path.suffix](file), limit)]
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from error
    except _LineError as error:
        raise ConfigError(f"trace {path}, line {error.line}: {error.reason}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path}: not a text file") from error
    if not arrivals:
        raise ConfigError(f"trace {path} holds no requests")
    first = min(arrival.time_s for arrival in arrivals)
    return tuple(sorted((a._replace(time_s=a.time_s - first) for a in arrivals), key=lambda a: a.time_s))


class _LineError(Exception):
    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line, self.reason = line, reason


def _azure(file: TextIO) -> Iterator[tuple[int, Arrival]]:
    reader = csv.DictReader(file)
    missing = [name for name in _AZURE_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise _LineError(1, f"column {', '.join(missing)} is missing; {', '.join(_AZURE_COLUMNS)} are needed")
    for row in reader:
        try:
            time, input_len, output_len = (row[name] for name in _AZURE_COLUMNS)
            yield reader.line_num, Arrival(datetime.fromisoformat(time).timestamp(), int(input_len), int(output_len))
        except (TypeError, ValueError) as error:
            raise _LineError(reader.line_num, str(error)) from error


def _mooncake(file: TextIO) -> Iterator[tuple[int, Arrival]]:
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
            hash_ids = tuple(int(hash_id) for hash_id in entry["hash_ids"])
            time_s = float(entry["timestamp"]) / 1e3
            yield line, Arrival(time_s, int(entry["input_length"]), int(entry["output_length"]), hash_ids)
        except KeyError as error:
            raise _LineError(line, f"key {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise _LineError(line, str(error)) from error


def _checked(path: Path, line: int, arrival: Arrival) -> Arrival:
    if arrival.input_len < 1 or arrival.output_len < 1:
        raise _LineError(line, f"lengths must be at least 1, not {arrival.input_len} and {arrival.output_len}")
    if arrival.hash_ids is not None and len(arrival.hash_ids) != -(-arrival.input_len // MOONCAKE_BLOCK_LEN):
        raise _LineError(
            line,
            f"{len(arrival.hash_ids)} hash_ids for {arrival.input_len} tokens; "
            f"one for each {MOONCAKE_BLOCK_LEN} is needed",
        )
    return arrival
