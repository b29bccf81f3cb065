"""Calls as they are written: JSON objects with a name and arguments, read piece by piece as they come.

A call is certain once its name, that of a tool, and the brace that begins its arguments are there. From then on they go
out as written, whatever follows; a call that is cut off has cut-off arguments. An object in another order (arguments
first, or as a text) is read when it has ended. What is certain depends on what was written, not on how it was cut.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

# The beginning of a call whose arguments come last, up to their brace. Llama calls them parameters.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
MAX_HEAD_CHARS = 1024
# What may stand between calls: white space, and what lists them.
SEPARATORS = " \t\r\n;,[]"


class CallPiece(NamedTuple):
    """Part of a call: its number in the answer, its name in its first piece only, and some of its arguments' JSON."""

    call_index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class CallReader:
    """Reads the calls of an answer, one after the other, until something comes that is none: then it `is_broken`, and
    `rest` is what was written since the last call (or, where there was none, all of it)."""

    names: frozenset[str]
    num_calls: int = 0
    is_broken: bool = False
    _where: Literal["between", "head", "arguments", "tail"] = "between"
    _skipped: str = ""
    _text: str = ""
    _object: "_Braces" = field(default_factory=lambda: _Braces())

    @property
    def rest(self) -> str:
        return self._skipped + self._text

    def push(self, text: str) -> list[CallPiece]:
        """The pieces that are certain with this text, at most one a call."""
        self._text += text
        found: list[CallPiece] = []
        before = None
        # Each pass reads up to where something else begins.
        while before != (self._where, len(self._text)) and not self.is_broken:
            before = self._where, len(self._text)
            piece = self._read()
            if piece is not None:
                _append(found, piece)
        return found

    def break_off(self) -> None:
        """Nothing more comes: what has not begun as a call is none."""
        self.is_broken = self.is_broken or self._where in ("between", "head")

    def has_nothing_left(self) -> bool:
        """Whether `rest` is no more than what may stand behind a call."""
        return not self.rest.strip(SEPARATORS)

    def _read(self) -> CallPiece | None:
        match self._where:
            case "between":
                return self._between()
            case "head":
                return self._head()
            case "arguments":
                return self._arguments()
            case "tail":
                return self._tail()

    def _between(self) -> CallPiece | None:
        text = self._text.lstrip(SEPARATORS)
        self._skipped += self._text[: len(self._text) - len(text)]
        self._text = text
        self.is_broken = bool(text) and text[0] != "{"
        if text and not self.is_broken:
            self._where, self._object = "head", _Braces()
        return None

    def _head(self) -> CallPiece | None:
        match = _HEAD.match(self._text[:MAX_HEAD_CHARS])
        name = _decoded(match[1]) if match else None
        if match and name in self.names:
            self._text, self._where, self._object = self._text[match.end() :], "arguments", _Braces()
            return self._begun(str(name), "")
        if not self._object.scan(self._text):
            return None
        whole = None if self._object.is_wrong else _whole_call(self._text[: self._object.place], self.names)
        if whole is None:
            self.is_broken = True
            return None
        self._text, self._where = self._text[self._object.place :], "between"
        return self._begun(*whole)

    def _arguments(self) -> CallPiece | None:
        has_ended = self._object.scan(self._text)
        written, self._text = self._text[: self._object.place], self._text[self._object.place :]
        self._object.place = 0
        if has_ended:
            # What is left of the object around them, unless that was given up with them.
            self._where, self._object = "between" if self._object.is_wrong else "tail", _Braces(depth=1)
        return CallPiece(self.num_calls - 1, None, written) if written else None

    def _tail(self) -> CallPiece | None:
        following = self._text.lstrip()
        if following and (following[0] not in ",}" or self._object.scan(self._text)):
            self._text, self._where = self._text[self._object.place :], "between"
        return None

    def _begun(self, name: str, arguments: str) -> CallPiece:
        self.num_calls += 1
        self._skipped = ""
        return CallPiece(self.num_calls - 1, name, arguments)


@dataclass(slots=True)
class _Braces:
    """Finds the end of a JSON object that comes in pieces: `place` is how far its text was looked at."""

    depth: int = 0
    place: int = 0
    is_wrong: bool = False
    _is_in_string: bool = False
    _is_escaped: bool = False

    def scan(self, text: str) -> bool:
        """Whether the object has ended, at `place`: with its last brace, or `is_wrong`, before what no JSON holds: a
        `<` outside its texts, with which a tag begins."""
        for place in range(self.place, len(text)):
            char = text[place]
            if self._is_in_string:
                self._is_in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_in_string = True
            elif char == "{":
                self.depth += 1
            elif char == "}":
                self.depth -= 1
                if self.depth == 0:
                    self.place = place + 1
                    return True
            elif char == "<":
                self.place, self.is_wrong = place, True
                return True
        self.place = len(text)
        return False


def _append(found: list[CallPiece], piece: CallPiece) -> None:
    """To what the same push has brought of the same call, if it has."""
    if found and found[-1].call_index == piece.call_index:
        last = found.pop()
        piece = CallPiece(last.call_index, last.name, last.arguments + piece.arguments)
    found.append(piece)


def _decoded(quoted: str) -> Any:
    try:
        return json.loads(quoted)
    except ValueError:
        return None


def _whole_call(written: str, names: frozenset[str]) -> tuple[str, str] | None:
    """The name and the arguments' JSON of a call that has been written to its end, in whatever order."""
    try:
        entry = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or entry["name"] not in names:
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        return entry["name"], arguments
    if not isinstance(arguments, dict):
        return None
    return entry["name"], json.dumps(arguments, ensure_ascii=False)
