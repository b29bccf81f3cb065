"""/v1/responses: OpenAI's newer endpoint, for text. Nothing is stored, so a conversation comes whole with each request.

A response is a chat with other names around it: `parse_response` makes a ChatCall, and what differs is the rendering.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from pagedjax.core.errors import RequestError
from pagedjax.core.request import MAX_LOGPROBS, SamplingParams
from serving import fields, schemas, shapes
from serving.fields import Check, boolean, integer, known_fields, number, one_of, record, refused, required, string
from serving.inputs import ModelFacts, read_messages
from serving.openai import Choice, Head, chat_logprob
from serving.schemas import ChatCall

if TYPE_CHECKING:
    from serving.interfaces import Delta, Tokenizer

LOGPROBS = "message.output_text.logprobs"


class ResponseCall(NamedTuple):
    """`chat` is what the engine does; `asked` are the fields that the response repeats, as they came."""

    chat: ChatCall
    asked: Mapping[str, Any]


def parse_response(body: Any, model: ModelFacts) -> ResponseCall:
    """Raises RequestError naming the field."""
    given = known_fields(record(body, "the request body"), FIELDS, lenient=model.options.lenient)
    schemas.check_model(given, model)
    logprobs = _logprobs(given)
    params = SamplingParams(
        max_tokens=given.get("max_output_tokens"),
        logprobs=logprobs,
        structured_outputs=given.get("text"),
        **{name: given[name] for name in ("temperature", "top_p") if name in given},
    )
    stream = given.get("stream", False)
    if "stream_options" in given and not stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    chat = ChatCall(
        messages=read_messages(_messages(given, model), model),
        params=params,
        logprobs=logprobs,
        stream=stream,
        # The last event of a stream tells the usage.
        include_usage=stream,
        priority=given.get("priority", 0),
        cache_salt=given.get("cache_salt", ""),
        timeout_s=given.get("timeout"),
    )
    return ResponseCall(chat, body)


class ResponseRendering:
    """One response: its object, or the events by which it grows."""

    done = b""

    def __init__(self, head: Head, call: ResponseCall, tokenizer: "Tokenizer") -> None:
        self._head, self._tokenizer = head, tokenizer
        self._call, self._asked = call
        self._message_id = f"msg_{head.id.removeprefix('resp-')}"
        self._num_events = 0
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._reason: str | None = None

    def begin(self, choice: Choice) -> bytes:
        response = self._response("in_progress", [], None)
        return b"".join(
            [
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
                self._event("response.content_part.added", **self._place(), part=self._part("", [])),
            ]
        )

    def chunk(self, choice: Choice, delta: "Delta") -> bytes:
        logprobs = self._shown_logprobs(delta.token_ids, delta.logprobs or ())
        self._texts.append(delta.text)
        self._logprobs += logprobs
        self._reason = delta.finish_reason
        if not delta.text and not logprobs:
            return b""
        return self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=logprobs)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The events that close a stream."""
        text, status = "".join(self._texts), self._status(self._reason)
        part = self._part(text, self._logprobs)
        message = self._message(status, [part])
        return b"".join(
            [
                self._event("response.output_text.done", **self._place(), text=text, logprobs=self._logprobs),
                self._event("response.content_part.done", **self._place(), part=part),
                self._event("response.output_item.done", output_index=0, item=message),
                self._event(f"response.{status}", response=self._response(status, [message], usage)),
            ]
        )

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        (choice,) = choices
        status = self._status(choice.finish_reason)
        part = self._part("".join(choice.texts), self._shown_logprobs(choice.token_ids, choice.logprobs))
        return self._response(status, [self._message(status, [part])], usage)

    def _status(self, reason: str | None) -> str:
        return "incomplete" if reason == "length" else "completed"

    def _event(self, kind: str, **body: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **body}
        self._num_events += 1
        return f"event: {kind}\ndata: ".encode() + orjson.dumps(body) + b"\n\n"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _shown_logprobs(self, token_ids: Sequence[int], found: Sequence[Any]) -> list[Any]:
        top = self._call.logprobs
        return [] if top is None else [chat_logprob(i, one, top, self._tokenizer) for i, one in zip(token_ids, found)]

    def _response(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        asked, params = self._asked, self._call.params
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": self._head.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage and _usage(usage),
            "user": asked.get("user"),
        }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


# ---- fields ----------------------------------------------------------------------------------------------------------


def _messages(given: Mapping[str, Any], model: ModelFacts) -> list[Any]:
    """`instructions` and `input` as a chat's messages."""
    asked = required(given, "input")
    if isinstance(asked, str):
        items: list[Any] = [{"role": "user", "content": asked}]
    else:
        items = [_item(item, f"input[{i}]") for i, item in enumerate(fields.array(asked, "input"))]
        if not items:
            raise RequestError("input must hold at least one item", param="input")
    first = [{"role": "system", "content": given["instructions"]}] if given.get("instructions") else []
    return first + items


def _item(value: Any, name: str) -> dict[str, Any]:
    kind = record(value, name).get("type", "message")
    if kind != "message":
        raise fields.unsupported(f"{name}.type", kind)
    known: dict[str, Check] = {
        "type": string,
        "role": one_of("user", "assistant", "system", "developer"),
        "content": _content,
        # What an earlier answer carries that is sent back.
        "id": string,
        "status": string,
        "phase": string,
    }
    given = known_fields(value, known, f"{name}.")
    return {"role": required(given, "role", f"{name}."), "content": required(given, "content", f"{name}.")}


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
    return shapes.response_format({"type": "json_schema", "json_schema": inner}, where)


def _include(value: Any, name: str) -> list[str]:
    return [one_of(LOGPROBS)(item, f"{name}[{i}]") for i, item in enumerate(fields.array(value, name))]


def _logprobs(given: Mapping[str, Any]) -> int | None:
    top = given.get("top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must lie in 0..{MAX_LOGPROBS}, not {top}", param="top_logprobs")
    return int(top or 0) if given.get("include") else None


def _at_least_one(value: Any, name: str) -> int:
    if integer(value, name) < 1:
        raise RequestError(f"{name} must be an integer at least 1, not {value}", param=name)
    return int(value)


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
    "priority": schemas.read_priority,
    "cache_salt": schemas.read_cache_salt,
    "timeout": schemas.read_timeout,
    "user": string,
    "metadata": schemas.read_metadata,
    "safety_identifier": string,
    "prompt_cache_key": string,
    "parallel_tool_calls": boolean,
    "store": one_of(False),
    "background": one_of(False),
    "service_tier": one_of("auto", "default"),
    "truncation": one_of("disabled"),
    "tools": one_of([]),
    "tool_choice": one_of("none", "auto"),
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
