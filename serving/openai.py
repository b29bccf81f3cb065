"""Results in OpenAI's shapes: whole bodies and stream chunks.

Choices of several prompts are numbered prompt by prompt: index = prompt_index * n + the sequence's index.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pagedjax.core.request import Logprob
from serving import sse
from serving.inputs import Prompt
from serving.interfaces import Delta, Stream, Tokenizer, TokenLogprobs
from serving.offsets import TextOffsets
from serving.schemas import ChatCall, CompletionCall
from serving.tools import Call, NamedParser, Parser, Piece, ToolFormat, parser_for, shown_call

# JSON has no -inf, and clients take exp() of what they get.
MIN_LOGPROB = -9999.0

Tokens = Iterable[tuple[int, TokenLogprobs | None]]


class Head(NamedTuple):
    """What every body of one response begins with."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class Choice:
    """One sequence as it grows. A stream keeps only what it still needs: counts, no texts."""

    index: int
    stream: Stream
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    offsets: TextOffsets | None = None
    parser: Parser | None = None
    num_calls: int = 0
    begun: bool = False

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Rendering(Protocol):
    """Bodies of one response. `begin` is what precedes a choice's first delta; both chunk methods may give nothing.
    `usage_chunk` comes last where usage was asked for, and then `done`."""

    @property
    def done(self) -> bytes: ...
    def begin(self, choice: Choice) -> bytes: ...
    def chunk(self, choice: Choice, delta: Delta) -> bytes: ...
    def usage_chunk(self, usage: dict[str, Any]) -> bytes: ...
    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]: ...


class CompletionRendering:
    """/v1/completions."""

    done = sse.DONE

    def __init__(self, head: Head, call: CompletionCall, tokenizer: Tokenizer) -> None:
        self._head, self._call, self._tokenizer = head, call, tokenizer
        self._templates: dict[int, sse.Template] = {}

    def begin(self, choice: Choice) -> bytes:
        if not self._call.echo:
            return b""
        return self._event(choice, self._prompt_text(choice), self._prompt_logprobs(choice))

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        if self._call.logprobs is None and delta.finish_reason is None:
            return self._template(choice).fill(delta.text) if delta.text else b""
        logprobs = self._logprobs(choice, delta.token_ids, delta.logprobs or ())
        return self._event(choice, delta.text, logprobs, delta)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return sse.event(_body(self._head, "text_completion", []) | {"usage": usage})

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return _body(self._head, "text_completion", [self._whole(choice) for choice in choices]) | {"usage": usage}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text, echoed = "".join(choice.texts), None
        if self._call.echo:
            text, echoed = self._prompt_text(choice) + text, self._prompt_logprobs(choice)
        logprobs = self._logprobs(choice, choice.token_ids, choice.logprobs)
        if echoed and logprobs:
            logprobs = {name: echoed[name] + logprobs[name] for name in logprobs}
        body = _choice(choice, {"text": text}, logprobs, choice)
        if self._call.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(choice.stream, self._call.prompt_logprobs)
        return body

    def _prompt_text(self, choice: Choice) -> str:
        prompt = self._prompt(choice)
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=self._call.params.skip_special_tokens)

    def _prompt(self, choice: Choice) -> Prompt:
        return self._call.prompts[choice.index // self._call.params.n]

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self._call.logprobs is None:
            return None
        stream, text = choice.stream, self._prompt_text(choice)
        is_written = isinstance(self._prompt(choice), str)
        offsets = self._offsets(choice).of_prompt(stream.prompt_token_ids, text, is_written=is_written)
        return completion_logprobs(_prompt_tokens(stream), self._call.logprobs, self._tokenizer, offsets)

    def _logprobs(
        self, choice: Choice, token_ids: Sequence[int], found: Sequence[TokenLogprobs]
    ) -> dict[str, Any] | None:
        """Continues the choice's text offsets."""
        if self._call.logprobs is None:
            return None
        offsets = self._offsets(choice).of_answer(token_ids)
        return completion_logprobs(zip(token_ids, found), self._call.logprobs, self._tokenizer, offsets)

    def _offsets(self, choice: Choice) -> TextOffsets:
        if choice.offsets is None:
            skip = self._call.params.skip_special_tokens
            choice.offsets = TextOffsets(self._tokenizer, skip_special_tokens=skip)
        return choice.offsets

    def _event(self, choice: Choice, text: str, logprobs: Any, end: Delta | None = None) -> bytes:
        chunk = _body(self._head, "text_completion", [_choice(choice, {"text": text}, logprobs, end)])
        return sse.event(chunk | _open_usage(self._call))

    def _template(self, choice: Choice) -> sse.Template:
        if choice.index not in self._templates:
            chunk = _body(self._head, "text_completion", [_choice(choice, {"text": sse.HOLE}, None)])
            self._templates[choice.index] = sse.template(chunk | _open_usage(self._call))
        return self._templates[choice.index]


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
        calls: tuple[Call, ...] = ()
        if self._call.tools:
            text, calls = self._parsed(choice, delta.text, is_last=is_last)
        if self._call.logprobs is None and not is_last and not calls:
            return self._template(choice).fill(text) if text else b""
        logprobs = self._logprobs(zip(delta.token_ids, delta.logprobs or ()))
        body: dict[str, Any] = {"content": text} if text else {}
        if calls:
            first = choice.num_calls - len(calls)
            body["tool_calls"] = [{"index": first + i, **shown_call(one)} for i, one in enumerate(calls)]
        return self._event(choice, body, logprobs, delta)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return sse.event(_body(self._head, "chat.completion.chunk", []) | {"usage": usage})

    def _parsed(self, choice: Choice, text: str, *, is_last: bool) -> Piece:
        """The content and the calls that are certain with this text."""
        parser = choice.parser = choice.parser or self._parser()
        content, calls = parser.push(text)
        if is_last:
            rest = parser.finish()
            content, calls = content + rest.content, calls + rest.calls
        choice.num_calls += len(calls)
        return Piece(content, calls)

    def _parser(self) -> Parser:
        mode, name = self._call.tool_choice.mode, self._call.tool_choice.name
        if mode == "named" and name is not None:
            return NamedParser(name)
        names = frozenset(tool["function"]["name"] for tool in self._call.tools)
        return parser_for("json" if mode == "required" else self._tool_format, names)

    def _reason(self, choice: Choice, reason: str | None) -> str | None:
        """OpenAI says tool_calls where the model chose what to call, and stop where the caller had chosen."""
        has_chosen = choice.num_calls > 0 and self._call.tool_choice.mode != "named"
        return "tool_calls" if has_chosen and reason == "stop" else reason

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        body = _body(self._head, "chat.completion", [self._whole(choice) for choice in choices]) | {"usage": usage}
        if self._call.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(choices[0].stream, self._call.prompt_logprobs)
        return body

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        calls: tuple[Call, ...] = ()
        if self._call.tools:
            text, calls = self._parsed(choice, text, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [shown_call(one) for one in calls]}
        logprobs = self._logprobs(zip(choice.token_ids, choice.logprobs))
        body = _choice(choice, {"message": message}, logprobs, choice)
        return body | {"finish_reason": self._reason(choice, choice.finish_reason)}

    def _logprobs(self, tokens: Iterable[tuple[int, TokenLogprobs]]) -> dict[str, Any] | None:
        top = self._call.logprobs
        if top is None:
            return None
        return {"content": [chat_logprob(i, found, top, self._tokenizer) for i, found in tokens], "refusal": None}

    def _event(self, choice: Choice, delta: dict[str, Any], logprobs: Any, end: Delta | None = None) -> bytes:
        body = _choice(choice, {"delta": delta}, logprobs, end)
        body["finish_reason"] = self._reason(choice, body["finish_reason"])
        chunk = _body(self._head, "chat.completion.chunk", [body])
        return sse.event(chunk | _open_usage(self._call))

    def _template(self, choice: Choice) -> sse.Template:
        if choice.index not in self._templates:
            opened = _choice(choice, {"delta": {"content": sse.HOLE}}, None)
            chunk = _body(self._head, "chat.completion.chunk", [opened])
            self._templates[choice.index] = sse.template(chunk | _open_usage(self._call))
        return self._templates[choice.index]


def usage(streams: Sequence[Stream], num_completion_tokens: int) -> dict[str, Any]:
    """A prompt counts once however many sequences it has."""
    num_prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in streams)},
    }


def completion_logprobs(tokens: Tokens, top: int, tokenizer: Tokenizer, offsets: Sequence[int]) -> dict[str, Any]:
    """OpenAI's four parallel lists.

    The first token of a prompt has no logprob. `top_logprobs` holds the `top` likeliest and the token itself; where
    two candidates read the same, the likelier one stays.
    """
    body: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": list(offsets)}
    for token_id, found in tokens:
        text = tokenizer.token_text(token_id) if found is None else found[token_id].decoded_token
        body["tokens"].append(text)
        body["token_logprobs"].append(None if found is None else finite(found[token_id].logprob))
        body["top_logprobs"].append(None if found is None else _top_by_text(token_id, found, top))
    return body


def chat_logprob(token_id: int, found: TokenLogprobs, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """One token of a chat answer with its `top` likeliest candidates."""

    def shown(candidate_id: int, candidate: Logprob) -> dict[str, Any]:
        token_bytes = list(tokenizer.token_bytes(candidate_id))
        return {"token": candidate.decoded_token, "logprob": finite(candidate.logprob), "bytes": token_bytes}

    likeliest = [shown(i, candidate) for i, candidate in _by_rank(found) if candidate.rank <= top][:top]
    return shown(token_id, found[token_id]) | {"top_logprobs": likeliest}


def prompt_logprobs(stream: Stream, top: int) -> list[dict[str, Any] | None]:
    """vLLM's field of that name: per prompt token, token id -> logprob, rank and text."""
    return [None if found is None else _by_id(i, found, top) for i, found in _prompt_tokens(stream)]


def finite(logprob: float) -> float:
    """-inf and NaN become MIN_LOGPROB."""
    return max(MIN_LOGPROB, logprob)


def _prompt_tokens(stream: Stream) -> Iterable[tuple[int, TokenLogprobs | None]]:
    return zip(stream.prompt_token_ids, stream.prompt_logprobs or ())


def _by_rank(found: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(found.items(), key=lambda item: item[1].rank)


def _kept(token_id: int, found: TokenLogprobs, top: int) -> list[tuple[int, Logprob]]:
    return [(i, shown) for i, shown in _by_rank(found) if shown.rank <= top or i == token_id]


def _by_id(token_id: int, found: TokenLogprobs, top: int) -> dict[str, Any]:
    return {str(i): one._asdict() | {"logprob": finite(one.logprob)} for i, one in _kept(token_id, found, top)}


def _top_by_text(token_id: int, found: TokenLogprobs, top: int) -> dict[str, float]:
    shown: dict[str, float] = {}
    for _, candidate in _kept(token_id, found, top):
        shown.setdefault(candidate.decoded_token, finite(candidate.logprob))
    return shown


def _body(head: Head, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}


def _choice(
    choice: Choice, content: dict[str, Any], logprobs: Any, end: Delta | Choice | None = None
) -> dict[str, Any]:
    """`end` is what says why the choice ended, if it did."""
    body = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": end and end.finish_reason}
    if end and end.finish_reason:
        body["stop_reason"] = end.stop_reason
    return body


def _open_usage(call: CompletionCall | ChatCall) -> dict[str, None]:
    """Where usage comes at the end, every other chunk says that it is not there yet."""
    return {"usage": None} if call.include_usage else {}
