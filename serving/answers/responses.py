"""/v1/responses: the response object, and the events by which one grows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from serving.answers.logprobs import chat_logprob
from serving.answers.openai import Choice, Head
from serving.answers.response_items import Items
from serving.interfaces import TokenLogprobs
from serving.requests.response_call import ResponseCall
from serving.tools.tool_calls import Parser, Piece, ToolFormat, parser_for

if TYPE_CHECKING:
    from serving.interfaces import Delta, Tokenizer


class ResponseRendering:
    """One response: its object, or the events by which it grows."""

    done = b""

    def __init__(
        self, head: Head, call: ResponseCall, tokenizer: "Tokenizer", tool_format: ToolFormat = "hermes"
    ) -> None:
        self._head, self._tokenizer = head, tokenizer
        self._call, self._asked = call
        self._num_events = 0
        self._items = Items(head.id)
        chat = self._call
        self._parser: Parser | None = parser_for(chat.tools, chat.tool_choice, tool_format) if chat.tools else None
        self._reason: str | None = None

    def begin(self, choice: Choice) -> bytes:
        response = self._response("in_progress", None)
        events = [("response.created", {"response": response}), ("response.in_progress", {"response": response})]
        # Where there are tools the first item may be a call.
        return self._events(events if self._parser else [*events, *self._items.begin_message()])

    def chunk(self, choice: Choice, delta: "Delta") -> bytes:
        self._reason = delta.finish_reason
        found = zip(delta.token_ids, delta.logprobs or ())
        return self._events(self._grown(delta.text, found, is_last=delta.finish_reason is not None))

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The events that close a stream."""
        status = self._status(self._reason)
        events = self._items.end(status)
        return self._events([*events, (f"response.{status}", {"response": self._response(status, usage)})])

    def failure(self, error: Mapping[str, Any]) -> bytes:
        """What is there so far, held back or not, and what went wrong: OpenAI's codes have one for all faults of a
        server."""
        events = self._grown("", (), is_last=True) if self._reason is None else []
        self._items.break_off()
        failed = self._response("failed", None) | {"error": {"code": "server_error", "message": error["message"]}}
        return self._events([*events, ("response.failed", {"response": failed})])

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        (choice,) = choices
        status = self._status(choice.finish_reason)
        self._grown("".join(choice.texts), zip(choice.token_ids, choice.logprobs), is_last=True)
        self._items.end(status)
        return self._response(status, usage)

    def _grown(
        self, text: str, tokens: Iterable[tuple[int, TokenLogprobs]], *, is_last: bool
    ) -> list[tuple[str, dict[str, Any]]]:
        """The events of some more text, which may hold calls."""
        top = self._call.logprobs
        logprobs = [] if top is None else [chat_logprob(i, found, top, self._tokenizer) for i, found in tokens]
        if self._parser is None:
            return self._items.say(text, logprobs) if text or logprobs else []
        piece = self._parser.push(text)
        if is_last:
            rest = self._parser.finish()
            piece = Piece(piece.content + rest.content, piece.calls + rest.calls)
        events = self._items.say(piece.content, logprobs) if piece.content else []
        return events + [event for call in piece.calls for event in self._items.call(call)]

    def _status(self, reason: str | None) -> str:
        return "incomplete" if reason == "length" else "completed"

    def _events(self, events: Iterable[tuple[str, dict[str, Any]]]) -> bytes:
        return b"".join([self._event(kind, body) for kind, body in events])

    def _event(self, kind: str, body: dict[str, Any]) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **body}
        self._num_events += 1
        return f"event: {kind}\ndata: ".encode() + orjson.dumps(body) + b"\n\n"

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
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
            "output": self._items.finished,
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage and _usage(usage),
            "user": asked.get("user"),
        }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
