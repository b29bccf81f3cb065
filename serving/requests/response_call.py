"""What /v1/responses accepts: a chat under other names. Nothing is stored, so a conversation comes whole each time."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pagedjax.core.errors import RequestError
from pagedjax.core.request import MAX_LOGPROBS, SamplingParams
from serving.requests import fields, request_fields, schemas, shapes
from serving.requests.fields import (
    Check,
    boolean,
    integer,
    known_fields,
    number,
    one_of,
    record,
    refused,
    required,
    string,
)
from serving.requests.inputs import ModelFacts, read_messages
from serving.requests.schemas import ChatCall
from serving.tools.tools import ToolChoice, callable_tools, read_arguments, read_choice, read_tools

LOGPROBS = "message.output_text.logprobs"


class ResponseCall(NamedTuple):
    """`chat` is what the engine does; `asked` are the fields that the response repeats, as they came."""

    chat: ChatCall
    asked: Mapping[str, Any]


def parse_response(body: Any, model: ModelFacts) -> ResponseCall:
    """Raises RequestError naming the field."""
    given = known_fields(record(body, fields.BODY), FIELDS, lenient=model.options.lenient)
    schemas.check_model(given, model)
    logprobs = _logprobs(given)
    tools, choice, shape = callable_tools(given, given.get("text"))
    params = SamplingParams(
        max_tokens=given.get("max_output_tokens"),
        logprobs=logprobs,
        structured_outputs=shape,
        **{name: given[name] for name in ("temperature", "top_p") if name in given},
    )
    stream = given.get("stream", False)
    if "stream_options" in given and not stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    chat = ChatCall(
        messages=read_messages(_messages(given), model),
        params=params,
        tools=tools,
        tool_choice=choice,
        logprobs=logprobs,
        stream=stream,
        # The last event of a stream tells the usage.
        include_usage=stream,
        priority=given.get("priority", 0),
        cache_salt=given.get("cache_salt", ""),
        timeout_s=given.get("timeout"),
    )
    return ResponseCall(chat, body)


def _messages(given: Mapping[str, Any]) -> list[Any]:
    """`instructions` and `input` as a chat's messages."""
    asked = required(given, "input")
    if isinstance(asked, str):
        messages: list[Any] = [{"role": "user", "content": asked}]
    else:
        messages = _joined([_item(item, f"input[{i}]") for i, item in enumerate(fields.array(asked, "input"))])
        if not messages:
            raise RequestError("input must hold at least one item", param="input")
    first = [{"role": "system", "content": given["instructions"]}] if given.get("instructions") else []
    return first + messages


def _item(value: Any, name: str) -> dict[str, Any]:
    """A message of a chat."""
    kind = record(value, name).get("type", "message")
    if kind not in _ITEMS:
        raise fields.unsupported(f"{name}.type", kind)
    read, known = _ITEMS[kind]
    return read(known_fields(value, known, f"{name}."), f"{name}.")


def _message(given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {"role": required(given, "role", prefix), "content": required(given, "content", prefix)}


def _call(given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What the model has called: a message of its own until it is joined to the others of its turn."""
    function = {name: required(given, name, prefix) for name in ("name", "arguments")}
    read_arguments(function["arguments"], f"{prefix}arguments")
    call = {"id": required(given, "call_id", prefix), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _output(given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    call_id, output = required(given, "call_id", prefix), required(given, "output", prefix)
    return {"role": "tool", "tool_call_id": call_id, "content": output}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the calls of one turn in one message, which is what templates know."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if "tool_calls" in message and joined and joined[-1]["role"] == "assistant":
            calls = [*joined[-1].get("tool_calls", ()), *message["tool_calls"]]
            joined[-1] = {**joined[-1], "tool_calls": calls}
        else:
            joined.append(message)
    return joined


def _content(value: Any, name: str) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    parts = fields.array(value, name)
    if not parts:
        raise fields.wrong(value, name, "a string or a non-empty array of text parts")
    return [_part(part, f"{name}[{i}]") for i, part in enumerate(parts)]


def _part(value: Any, name: str) -> dict[str, str]:
    kind = record(value, name).get("type")
    if kind not in ("input_text", "output_text"):
        raise fields.unsupported(f"{name}.type", kind)
    known: dict[str, Check] = {"type": string, "text": string, "annotations": fields.array, "logprobs": fields.array}
    given = known_fields(value, known, f"{name}.")
    return {"type": "text", "text": required(given, "text", f"{name}.")}


def _text(value: Any, name: str) -> Any:
    """The format asked for, flat where a chat's response_format nests it."""
    known: dict[str, Check] = {"format": record, "verbosity": one_of("medium")}
    given = known_fields(record(value, name), known, f"{name}.").get("format")
    if given is None:
        return None
    where = f"{name}.format"
    if given.get("type") != "json_schema":
        return shapes.response_format(given, where)
    inner = {key: entry for key, entry in given.items() if key != "type"}
    if "schema" not in inner:
        raise RequestError(f"{where}.schema is required", param=f"{where}.schema", code="missing_required_parameter")
    return shapes.named_schema(inner, where, where)


def _include(value: Any, name: str) -> list[str]:
    return [one_of(LOGPROBS)(item, f"{name}[{i}]") for i, item in enumerate(fields.array(value, name))]


def _logprobs(given: Mapping[str, Any]) -> int | None:
    top = given.get("top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must lie in 0..{MAX_LOGPROBS}, not {top}", param="top_logprobs")
    if top and not given.get("include"):
        raise RequestError(f"top_logprobs needs include to have {LOGPROBS}", param="top_logprobs")
    return int(top or 0) if given.get("include") else None


def _at_least_one(value: Any, name: str) -> int:
    if integer(value, name) < 1:
        raise RequestError(f"{name} must be an integer at least 1, not {value}", param=name)
    return int(value)


def _tools(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Flat, where a chat's tools nest what is the function's."""
    return read_tools([_nested(tool, f"{name}[{i}]") for i, tool in enumerate(fields.array(value, name))], name)


def _nested(value: Any, name: str) -> dict[str, Any]:
    kind = required(record(value, name), "type", f"{name}.")
    if kind != "function":
        raise fields.unsupported(f"{name}.type", kind)
    return {"type": kind, "function": {field: entry for field, entry in value.items() if field != "type"}}


def _choice(value: Any, name: str) -> ToolChoice:
    return read_choice(value if isinstance(value, str) else _nested(value, name), name)


# What an item that is sent back carries beside what it says.
_MARKS: dict[str, Check] = {"type": string, "id": string, "status": string}
_ITEMS: dict[str, tuple[Callable[[Mapping[str, Any], str], dict[str, Any]], dict[str, Check]]] = {
    "message": (
        _message,
        {
            **_MARKS,
            "phase": string,
            "role": one_of("user", "assistant", "system", "developer"),
            "content": _content,
        },
    ),
    "function_call": (_call, {**_MARKS, "call_id": string, "name": string, "arguments": string}),
    "function_call_output": (_output, {**_MARKS, "call_id": string, "output": _content}),
}
FIELDS: dict[str, Check] = {
    "model": string,
    "input": lambda value, name: value,
    "instructions": string,
    "max_output_tokens": _at_least_one,
    "temperature": number,
    "top_p": number,
    "top_logprobs": integer,
    "include": _include,
    "stream": boolean,
    "stream_options": lambda value, name: known_fields(
        record(value, name), {"include_obfuscation": one_of(False)}, f"{name}."
    ),
    "text": _text,
    "priority": request_fields.read_priority,
    "cache_salt": request_fields.read_cache_salt,
    "timeout": request_fields.read_timeout,
    "user": string,
    "metadata": request_fields.read_metadata,
    "safety_identifier": string,
    "prompt_cache_key": string,
    "parallel_tool_calls": boolean,
    "store": one_of(False),
    "background": one_of(False),
    "service_tier": one_of("auto", "default"),
    "truncation": one_of("disabled"),
    "tools": _tools,
    "tool_choice": _choice,
    "prompt_cache_retention": one_of("in_memory"),
    **dict.fromkeys(("access_programs", "background_options", "image"), refused),
    "reasoning": refused,
    "previous_response_id": refused,
    "conversation": refused,
    "context_management": refused,
    "max_tool_calls": refused,
    "moderation": refused,
    "prompt": refused,
    "prompt_cache_options": refused,
}
