"""Tools as they are asked for: what a chat may call, what it must, and the shape that this gives its answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from pagedjax.core.errors import RequestError
from pagedjax.core.structure import StructuredOutputsParams
from serving.requests import fields
from serving.requests.fields import Check, boolean, known_fields, record, required, string

MAX_TOOLS, MAX_NAME_CHARS = 128, 64


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode` none, auto, required, or named with the `name` of a tool."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None


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


_FUNCTION: dict[str, Check] = {
    "name": _name,
    "description": string,
    "parameters": fields.shallow_record,
    "strict": boolean,
}


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


def callable_tools(
    given: Mapping[str, Any], shape: StructuredOutputsParams | None
) -> tuple[tuple[dict[str, Any], ...], ToolChoice, StructuredOutputsParams | None]:
    """The tools that may be called by a request's checked fields, the choice among them, and the shape that the output
    must have, beside `shape`, which was asked for otherwise."""
    found, choice = given.get("tools", ()), given.get("tool_choice", ToolChoice())
    check_choice(found, choice)
    must_call = wish(found, choice, is_parallel=given.get("parallel_tool_calls", True))
    if shape is not None and must_call is not None:
        raise RequestError("a required tool call and another shape can't both be had", param=shape.param)
    return (() if choice.mode == "none" else found), choice, shape or must_call


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
    """The schema of a function's arguments: those that it names and no others, unless it says so. Without `parameters`
    it has none."""
    schema = dict(function.get("parameters", {"type": "object", "properties": {}}))
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
    arguments = read_arguments(function.get("arguments") or "{}", f"{inner}arguments")
    shown = {"name": required(function, "name", inner), "arguments": arguments}
    return {"type": "function", "function": shown, **({"id": given["id"]} if "id" in given else {})}


def read_arguments(text: str, name: str) -> dict[str, Any]:
    """The arguments of a call, which come as JSON text."""
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{name} must be the text of a JSON object", param=name)
    return fields.shallow_record(arguments, name)
