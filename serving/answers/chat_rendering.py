"""/v1/chat/completions: the whole body, and the chunks of a stream, with the calls that are read from the text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serving.answers import sse
from serving.answers.logprobs import chat_logprob, prompt_logprobs
from serving.answers.openai import Choice, Head, body_of, choice_of, chunk_usage
from serving.interfaces import Delta, Tokenizer, TokenLogprobs
from serving.requests.schemas import ChatCall
from serving.tools.call_reader import CallPiece
from serving.tools.tool_calls import Call, Piece, ToolFormat, new_call_id, parser_for, whole_calls


class ChatRendering:
    """/v1/chat/completions. Where there are tools, calls to them are read from the text, in `tool_format`."""

    done = sse.DONE

    def __init__(self, head: Head, call: ChatCall, tokenizer: Tokenizer, tool_format: ToolFormat = "hermes") -> None:
        self._head, self._call, self._tokenizer = head, call, tokenizer
        self._tool_format = tool_format
        self._templates: dict[int, sse.Template] = {}

    def begin(self, choice: Choice) -> bytes:
        return self._event(choice, {"role": "assistant", "content": ""}, None)

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        is_last, text = delta.finish_reason is not None, delta.text
        calls: tuple[CallPiece, ...] = ()
        if self._call.tools:
            text, calls = self._parsed(choice, delta.text, is_last=is_last)
        if self._call.logprobs is None and not is_last and not calls and not self._call.continuous_usage:
            return self._template(choice).fill(text) if text else b""
        logprobs = self._logprobs(zip(delta.token_ids, delta.logprobs or ()))
        body: dict[str, Any] = {"content": text} if text else {}
        if calls:
            body["tool_calls"] = [shown_piece(piece) for piece in calls]
        return self._event(choice, body, logprobs, delta)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return sse.event(body_of(self._head, "chat.completion.chunk", []) | {"usage": usage})

    def failure(self, error: Mapping[str, Any]) -> bytes:
        return sse.failure(error)

    def _parsed(self, choice: Choice, text: str, *, is_last: bool) -> Piece:
        """The content that is certain with this text, and what is of calls."""
        if choice.parser is None:
            choice.parser = parser_for(self._call.tools, self._call.tool_choice, self._tool_format)
        content, calls = choice.parser.push(text)
        if is_last:
            rest = choice.parser.finish()
            content, calls = content + rest.content, calls + rest.calls
        choice.num_calls += sum(piece.name is not None for piece in calls)
        return Piece(content, calls)

    def _reason(self, choice: Choice, reason: str | None) -> str | None:
        """OpenAI says tool_calls where the model chose what to call, and stop where the caller had chosen."""
        has_chosen = choice.num_calls > 0 and self._call.tool_choice.mode != "named"
        return "tool_calls" if has_chosen and reason == "stop" else reason

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        body = body_of(self._head, "chat.completion", [self._whole(choice) for choice in choices]) | {"usage": usage}
        if self._call.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(choices[0].stream, self._call.prompt_logprobs)
        return body

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        pieces: tuple[CallPiece, ...] = ()
        if self._call.tools:
            text, pieces = self._parsed(choice, text, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if pieces:
            message |= {"content": text or None, "tool_calls": [shown_call(call) for call in whole_calls(pieces)]}
        logprobs = self._logprobs(zip(choice.token_ids, choice.logprobs))
        body = choice_of(choice, {"message": message}, logprobs, choice)
        return body | {"finish_reason": self._reason(choice, choice.finish_reason)}

    def _logprobs(self, tokens: Iterable[tuple[int, TokenLogprobs]]) -> dict[str, Any] | None:
        top = self._call.logprobs
        if top is None:
            return None
        return {"content": [chat_logprob(i, found, top, self._tokenizer) for i, found in tokens], "refusal": None}

    def _event(self, choice: Choice, delta: dict[str, Any], logprobs: Any, end: Delta | None = None) -> bytes:
        body = choice_of(choice, {"delta": delta}, logprobs, end)
        body["finish_reason"] = self._reason(choice, body["finish_reason"])
        chunk = body_of(self._head, "chat.completion.chunk", [body])
        return sse.event(chunk | chunk_usage(self._call, choice))

    def _template(self, choice: Choice) -> sse.Template:
        if choice.index not in self._templates:
            opened = choice_of(choice, {"delta": {"content": sse.HOLE}}, None)
            chunk = body_of(self._head, "chat.completion.chunk", [opened])
            self._templates[choice.index] = sse.template(chunk | chunk_usage(self._call, choice))
        return self._templates[choice.index]


def shown_call(call: Call) -> dict[str, Any]:
    return {"id": new_call_id(), "type": "function", "function": call._asdict()}


def shown_piece(piece: CallPiece) -> dict[str, Any]:
    """Part of a call as a stream has it: its id and name come with the first."""
    if piece.name is None:
        return {"index": piece.call_index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.call_index, "id": new_call_id(), "type": "function", "function": function}
