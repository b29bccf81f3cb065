"""How a model's calls are told from what it says: a parser for each form in which models write them.

Hermes and Qwen write JSON between tags, Llama 3 JSON objects with `parameters`, others plain JSON. Where a call is
required, structured output makes sure of its form, and no parser has to guess.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

from serving.tools.call_reader import SEPARATORS, CallPiece, CallReader
from serving.tools.tools import ToolChoice

ToolFormat = Literal["hermes", "llama3_json", "json"]
FORMATS = get_args(ToolFormat)
BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class Call(NamedTuple):
    """A call that a model has written. `arguments` is JSON text, cut off where the answer was."""

    name: str
    arguments: str


class Piece(NamedTuple):
    """What a parser makes of a piece of text: `content`, and what is certain with it of calls."""

    content: str = ""
    calls: tuple[CallPiece, ...] = ()


class Parser(Protocol):
    """Text comes in as it is generated, content and calls go out; all pieces together do not depend on how it came."""

    def push(self, text: str) -> Piece: ...
    def finish(self) -> Piece: ...


def parser_for(tools: Sequence[Mapping[str, Any]], choice: ToolChoice, tool_format: ToolFormat) -> Parser:
    """A parser of one answer in which these tools may be called, or have to be."""
    if choice.name is not None:
        return NamedParser(choice.name)
    names = frozenset(tool["function"]["name"] for tool in tools)
    is_tagged = tool_format == "hermes" and choice.mode != "required"
    return TagParser(names) if is_tagged else JsonParser(names)


def whole_calls(pieces: Iterable[CallPiece]) -> tuple[Call, ...]:
    """The calls of an answer that are put together of these."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if piece.name is not None:
            names.append(piece.name)
            arguments.append([])
        arguments[piece.call_index].append(piece.arguments)
    return tuple(Call(name, "".join(parts)) for name, parts in zip(names, arguments))


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class TagParser:
    """Hermes: `<tool_call>{"name": …, "arguments": …}</tool_call>`, any number of times, among content. `_reader` reads
    what is between tags."""

    names: frozenset[str]
    _held: str = ""
    _reader: CallReader | None = None
    _num_calls: int = 0
    _skips_space: bool = False

    def push(self, text: str) -> Piece:
        content: list[str] = []
        calls: list[CallPiece] = []
        self._held += text
        goes_on = True
        while goes_on:
            if self._reader is None:
                goes_on = self._outside(content)
            elif not self._reader.is_broken:
                goes_on = self._inside(self._reader, calls)
            else:
                goes_on = self._behind(self._reader, content)
        return Piece("".join(content), tuple(calls))

    def finish(self) -> Piece:
        """A call that lacks only its end tag counts."""
        rest, self._held = self._held, ""
        reader, self._reader = self._reader, None
        if reader is None:
            return Piece(self._content(rest))
        if not reader.is_broken:
            reader.break_off()
            rest = reader.rest if reader.is_broken else ""
        if self._has_call(reader) and (reader.has_nothing_left() or END.startswith(rest.strip())):
            return Piece()
        return Piece(self._content(rest if self._has_call(reader) else BEGIN + rest))

    def _outside(self, content: list[str]) -> bool:
        before, has_tag, after = self._held.partition(BEGIN)
        certain = len(before) if has_tag else len(self._held) - _num_common(self._held, BEGIN)
        content.append(self._content(self._held[:certain]))
        self._held = after if has_tag else self._held[certain:]
        if has_tag:
            self._reader = CallReader(self.names, self._num_calls)
        return bool(has_tag)

    def _inside(self, reader: CallReader, calls: list[CallPiece]) -> bool:
        calls += reader.push(self._held)
        self._held = reader.rest if reader.is_broken else ""
        return reader.is_broken

    def _behind(self, reader: CallReader, content: list[str]) -> bool:
        """What follows a call is its end tag, or else content; and so is what was no call, with its tag."""
        behind = self._held.lstrip(SEPARATORS)
        if self._has_call(reader) and len(behind) < len(END) and END.startswith(behind):
            return False
        if not self._has_call(reader):
            content.append(self._content(BEGIN))
        elif behind.startswith(END):
            self._held, self._skips_space = behind.removeprefix(END), True
        self._num_calls, self._reader = reader.num_calls, None
        return True

    def _has_call(self, reader: CallReader) -> bool:
        return reader.num_calls > self._num_calls

    def _content(self, text: str) -> str:
        """White space behind a call is no content."""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text


@dataclass(slots=True)
class JsonParser:
    """The answer is calls, as JSON objects or an array of them, or it is content. Llama 3 may begin with
    `<|python_tag|>` and separates calls by semicolons."""

    names: frozenset[str]
    _begin: str = ""
    _reader: CallReader | None = None
    _is_content: bool = False

    def push(self, text: str) -> Piece:
        if self._is_content:
            return Piece(text)
        if self._reader is None:
            self._begin += text
            begun = self._begin.lstrip()
            if PYTHON_TAG.startswith(begun):
                return Piece()
            text = begun.removeprefix(PYTHON_TAG)
            self._begin = self._begin.removesuffix(text)
            self._reader = CallReader(self.names)
        calls = tuple(self._reader.push(text))
        return Piece(self._given_up(self._reader), calls) if self._reader.is_broken else Piece("", calls)

    def finish(self) -> Piece:
        if self._is_content:
            return Piece()
        if self._reader is None:
            return Piece(self._begin)
        self._reader.break_off()
        is_done = not self._reader.is_broken or (self._reader.num_calls > 0 and self._reader.has_nothing_left())
        return Piece() if is_done else Piece(self._given_up(self._reader))

    def _given_up(self, reader: CallReader) -> str:
        self._is_content = True
        return reader.rest if reader.num_calls else self._begin + reader.rest


@dataclass(slots=True)
class NamedParser:
    """The whole answer is the arguments of one call."""

    name: str
    _has_begun: bool = False

    def push(self, text: str) -> Piece:
        if not text:
            return Piece()
        name = None if self._has_begun else self.name
        self._has_begun = True
        return Piece("", (CallPiece(0, name, text),))

    def finish(self) -> Piece:
        return Piece() if self._has_begun else Piece("", (CallPiece(0, self.name, ""),))


def _num_common(text: str, tag: str) -> int:
    """Length of the longest proper beginning of `tag` with which `text` ends."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
