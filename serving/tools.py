"""Tools: what a chat may call, how a model is told so, and how its calls are read from what it writes.

Models write calls in the form that their template taught them: Hermes and Qwen as JSON between tags, Llama 3 as JSON
objects with `parameters`, others as plain JSON. Where a call is required, structured output makes sure of its form, and
no parser has to guess.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import orjson

from pagedjax.core.errors import RequestError
from pagedjax.core.structure import StructuredOutputsParams
from serving import fields
from serving.fields import Check, boolean, known_fields, record, required, string
from serving.interfaces import Tokenizer

ToolFormat = Literal["hermes", "llama3_json", "json"]
FORMATS = get_args(ToolFormat)
MAX_TOOLS, MAX_NAME_CHARS = 128, 64
BEGIN, END = "<tool_call>", "</tool_call>"
# For models whose template knows no tools: Hermes' form, told in words.
INSTRUCTIONS = """You can call functions. Their signatures, one a line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode` none, auto, required, or named with the `name` of a tool."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None


class Call(NamedTuple):
    """A call that a model has written. `arguments` is JSON text."""

    name: str
    arguments: str


class Piece(NamedTuple):
    """What a parser makes of a piece of text: `content`, and calls that are complete with it."""

    content: str = ""
    calls: tuple[Call, ...] = ()


class Parser(Protocol):
    """Text comes in as it is generated, content and calls go out; all pieces together do not depend on how it came."""

    def push(self, text: str) -> Piece: ...
    def finish(self) -> Piece: ...


# ---- what is asked ---------------------------------------------------------------------------------------------------


def read_tools(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """OpenAI's list of function tools, each checked."""
    tools = fields.array(value, name)
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{name} holds {len(tools)} tools, at most {MAX_TOOLS} are allowed", param=name)
    read = tuple(_tool(tool, f"{name}[{i}]") for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in read]
    if len(set(names)) < len(names):
        raise RequestError(f"{name} holds two tools of one name", param=name)
    return read


def _tool(value: Any, name: str) -> dict[str, Any]:
    kind = required(record(value, name), "type", f"{name}.")
    if kind != "function":
        raise fields.unsupported(f"{name}.type", kind)
    given = known_fields(value, {"type": string, "function": record}, f"{name}.")
    inner = f"{name}.function."
    function = known_fields(required(given, "function", f"{name}."), _FUNCTION, inner)
    required(function, "name", inner)
    return {"type": "function", "function": function}


def _name(value: Any, name: str) -> str:
    if not 0 < len(string(value, name)) <= MAX_NAME_CHARS:
        raise RequestError(f"{name} must have 1 to {MAX_NAME_CHARS} characters", param=name)
    return str(value)


_FUNCTION: dict[str, Check] = {"name": _name, "description": string, "parameters": record, "strict": boolean}


def read_choice(value: Any, name: str) -> ToolChoice:
    """none, auto, required, or an object that names a function."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if isinstance(value, str):
        raise fields.unsupported(name, value)
    if required(record(value, name), "type", f"{name}.") != "function":
        raise fields.unsupported(f"{name}.type", value["type"])
    given = known_fields(value, {"type": string, "function": record}, f"{name}.")
    inner = known_fields(required(given, "function", f"{name}."), {"name": string}, f"{name}.function.")
    return ToolChoice("named", required(inner, "name", f"{name}.function."))


def check_choice(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> None:
    """A call can be required only of tools that are there."""
    names = {tool["function"]["name"] for tool in tools}
    if choice.mode == "required" and not tools:
        raise RequestError("tool_choice required needs tools", param="tool_choice")
    if choice.name is not None and choice.name not in names:
        raise RequestError(f"tool_choice names {choice.name[:100]!r}, which is not in tools", param="tool_choice")


def wish(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, *, is_parallel: bool
) -> StructuredOutputsParams | None:
    """The shape of an output that must call: the named tool's arguments, or an array of calls."""
    functions = {tool["function"]["name"]: _arguments(tool["function"]) for tool in tools}
    if choice.mode == "named" and choice.name is not None:
        return StructuredOutputsParams(json=functions[choice.name], param="tools")
    if choice.mode != "required":
        return None
    # Each tool's schema stands apart, so that its references within itself still mean what they meant.
    definitions = {f"tool_{i}": _moved(schema, f"#/$defs/tool_{i}") for i, schema in enumerate(functions.values())}
    calls = [_call_schema(name, f"#/$defs/tool_{i}") for i, name in enumerate(functions)]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    if not is_parallel:
        schema["maxItems"] = 1
    return StructuredOutputsParams(json=schema, param="tools")


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: those that it names and no others, unless it says so."""
    schema = dict(function.get("parameters", {"type": "object"}))
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def _call_schema(name: str, reference: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": reference}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references from `#` taken from `root` instead."""
    if isinstance(schema, list):
        return [_moved(entry, root) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }


# ---- how the model is told -------------------------------------------------------------------------------------------


def format_for(template: str) -> ToolFormat:
    """The form in which a model with this chat template writes its calls."""
    if BEGIN in template or "tools" not in template:
        return "hermes"
    return "llama3_json" if "<|python_tag|>" in template or "ipython" in template else "json"


def tags_are_hidden(tokenizer: Tokenizer) -> bool:
    """Whether the tags around calls are special tokens, which text leaves out unless it is told not to."""
    return any(tokenizer.token_text(token_id) in (BEGIN, END) for token_id in tokenizer.special_token_ids)


def for_template(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as the template wants them: one that knows no tools gets them in words."""
    if "tools" in template:
        return list(messages), list(tools) or None
    spoken = [_in_words(message) for message in messages]
    if not tools:
        return spoken, None
    text = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if spoken and spoken[0]["role"] == "system":
        first = spoken[0] | {"content": f"{spoken[0]['content']}\n\n{text}"}
        return [first, *spoken[1:]], None
    return [{"role": "system", "content": text}, *spoken], None


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls", ())
    if not calls:
        return message
    written = [f"{BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}" for call in calls]
    content = "\n".join([*filter(None, [message.get("content")]), *written])
    return {"role": message["role"], "content": content}


# ---- how its calls are read ------------------------------------------------------------------------------------------


def parser_for(tool_format: ToolFormat, names: frozenset[str]) -> Parser:
    """A parser of one answer in which these tools may be called."""
    return TagParser(names) if tool_format == "hermes" else JsonParser(names)


@dataclass(slots=True)
class TagParser:
    """Hermes: `<tool_call>{"name": …, "arguments": …}</tool_call>`, any number of times, among content."""

    names: frozenset[str]
    _held: str = ""
    _is_inside: bool = False
    _skips_space: bool = False

    def push(self, text: str) -> Piece:
        self._held += text
        found = Piece()
        while True:
            tag = END if self._is_inside else BEGIN
            before, has_tag, after = self._held.partition(tag)
            if not has_tag:
                break
            piece = self._read(before, END) if self._is_inside else self._content(before)
            found, self._held = _joined(found, piece), after
            self._is_inside = not self._is_inside
        if self._is_inside:
            return found
        certain = len(self._held) - _num_common(self._held, BEGIN)
        shown, self._held = self._held[:certain], self._held[certain:]
        return _joined(found, self._content(shown))

    def finish(self) -> Piece:
        """A call that lacks only its end tag counts."""
        rest, self._held = self._held, ""
        return self._read(rest, "") if self._is_inside else self._content(rest)

    def _read(self, written: str, end: str) -> Piece:
        calls = read_calls(written, self.names)
        if calls is None:
            return self._content(f"{BEGIN}{written}{end}")
        self._skips_space = True
        return Piece("", calls)

    def _content(self, text: str) -> Piece:
        """White space behind a call is no content."""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return Piece(text)


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(first.content + second.content, first.calls + second.calls)


@dataclass(slots=True)
class JsonParser:
    """The whole answer is calls, as JSON objects or an array of them, or it is content. Llama 3 may begin with
    `<|python_tag|>` and separates calls by semicolons."""

    names: frozenset[str]
    _held: str = ""
    _is_content: bool = False

    def push(self, text: str) -> Piece:
        if self._is_content:
            return Piece(text)
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun[0] in "{[" or PYTHON_TAG.startswith(begun) or begun.startswith(PYTHON_TAG):
            return Piece()
        self._is_content = True
        return Piece(self._held)

    def finish(self) -> Piece:
        if self._is_content:
            return Piece()
        calls = read_calls(self._held.strip().removeprefix(PYTHON_TAG), self.names)
        return Piece(self._held) if calls is None else Piece("", calls)


@dataclass(slots=True)
class NamedParser:
    """The whole answer is the arguments of one call."""

    name: str
    _texts: list[str] = field(default_factory=list)

    def push(self, text: str) -> Piece:
        self._texts.append(text)
        return Piece()

    def finish(self) -> Piece:
        return Piece("", (Call(self.name, "".join(self._texts)),))


PYTHON_TAG = "<|python_tag|>"


def read_calls(written: str, names: frozenset[str]) -> tuple[Call, ...] | None:
    """The calls in a text that holds nothing else, or None."""
    values = _json_values(written)
    if values is None:
        return None
    entries = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    calls = [_call(entry, names) for entry in entries]
    found = tuple(call for call in calls if call is not None)
    return found if found and len(found) == len(calls) else None


def _json_values(written: str) -> list[Any] | None:
    """JSON values one after the other, with white space, semicolons or commas between them."""
    decoder, values, start = json.JSONDecoder(), [], 0
    written = written.strip()
    while start < len(written):
        try:
            value, start = decoder.raw_decode(written, start)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        while start < len(written) and written[start] in " \t\r\n;,":
            start += 1
    return values


def _call(entry: Any, names: frozenset[str]) -> Call | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or entry["name"] not in names:
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(entry["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(entry["name"], json.dumps(arguments, ensure_ascii=False))


def _num_common(text: str, tag: str) -> int:
    """Length of the longest proper beginning of `tag` with which `text` ends."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def shown_call(call: Call) -> dict[str, Any]:
    """A call in OpenAI's shape."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def read_message_calls(value: Any, name: str) -> list[dict[str, Any]]:
    """An assistant's earlier calls, with their arguments as values, which is what templates want."""
    return [_message_call(call, f"{name}[{i}]") for i, call in enumerate(fields.array(value, name))]


def _message_call(value: Any, name: str) -> dict[str, Any]:
    known: dict[str, Check] = {
        "id": string,
        "type": fields.one_of("function"),
        "function": record,
        "index": fields.integer,
    }
    given = known_fields(record(value, name), known, f"{name}.")
    inner = f"{name}.function."
    function = known_fields(required(given, "function", f"{name}."), {"name": string, "arguments": string}, inner)
    try:
        arguments = orjson.loads(function.get("arguments") or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{inner}arguments must be the text of a JSON object", param=f"{inner}arguments")
    shown = {"name": required(function, "name", inner), "arguments": arguments}
    return {"type": "function", "function": shown, **({"id": given["id"]} if "id" in given else {})}
