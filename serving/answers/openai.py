"""What all answers in OpenAI's shapes have in common: their head, their choices as they grow, usage.

Choices of several prompts are numbered prompt by prompt: index = prompt_index * n + the sequence's index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from serving.answers.offsets import TextOffsets
from serving.interfaces import Delta, Stream, TokenLogprobs
from serving.requests.schemas import ChatCall, CompletionCall
from serving.tools.tool_calls import Parser


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
    num_tokens: int = 0
    begun: bool = False

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Rendering(Protocol):
    """Bodies of one response. `begin` is what precedes a choice's first delta; both chunk methods may give nothing.
    `usage_chunk` comes last where usage was asked for, and then `done`; `failure` in place of both where the stream has
    begun and fails."""

    @property
    def done(self) -> bytes: ...
    def begin(self, choice: Choice) -> bytes: ...
    def chunk(self, choice: Choice, delta: Delta) -> bytes: ...
    def usage_chunk(self, usage: dict[str, Any]) -> bytes: ...
    def failure(self, error: Mapping[str, Any]) -> bytes: ...
    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]: ...


def usage(streams: Sequence[Stream], num_completion_tokens: int) -> dict[str, Any]:
    """A prompt counts once however many sequences it has."""
    num_prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in streams)},
    }


def body_of(head: Head, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}


def choice_of(
    choice: Choice, content: dict[str, Any], logprobs: Any, end: Delta | Choice | None = None
) -> dict[str, Any]:
    """`end` is what says why the choice ended, if it did."""
    body = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": end and end.finish_reason}
    if end and end.finish_reason:
        body["stop_reason"] = end.stop_reason
    return body


def chunk_usage(call: CompletionCall | ChatCall, choice: Choice) -> dict[str, Any]:
    """Where usage comes at the end, every other chunk says that it is not there yet, or what it is of its choice."""
    if call.continuous_usage:
        return {"usage": usage([choice.stream], choice.num_tokens)}
    return {"usage": None} if call.include_usage else {}
