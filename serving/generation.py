"""One generating request from its streams to the client: collect or stream, and end early when it must.

A request ends early when its client goes (its sequences are aborted), when its time is up or the server gives up
waiting at shutdown (the client gets an error), or when the engine fails. Response headers wait for the first delta, so
that whatever goes wrong before it has its own status; after it an error is one more event, and the stream closes
without [DONE].
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from pagedjax.core.errors import RequestError
from pagedjax.core.request import FinishReason
from serving import errors
from serving.active import Active
from serving.answers import openai, sse
from serving.answers.openai import Choice, Rendering
from serving.embedding import EmbeddingCall
from serving.interfaces import Delta, Stream
from serving.requests.schemas import ChatCall, CompletionCall
from serving.telemetry.tracing import Generated

if TYPE_CHECKING:
    from serving.service import Service

log = logging.getLogger(__name__)

Take = Callable[[Choice, Delta], Awaitable[None]]
# About what one candidate of a token's log-probabilities takes as JSON.
CANDIDATE_BYTES = 64


class Generation:
    """An ASGI response over the streams of one request, which it owns: what is unfinished at the end is aborted."""

    def __init__(
        self,
        streams: Sequence[Stream],
        call: CompletionCall | ChatCall | EmbeddingCall,
        rendering: Rendering,
        service: "Service",
        active: Active,
    ) -> None:
        self._streams, self._call, self._rendering = streams, call, rendering
        self._service, self._workers, self._active = service, service.workers, active
        n = call.params.n
        self._choices = [Choice(i, streams[i // n]) for i in range(n * len(streams))]
        self._score_only = isinstance(call, CompletionCall) and call.score_only
        self._num_completion_tokens = 0
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        work = self._stream(send, state["send_on"]) if self._call.stream else self._whole(scope, receive, send)
        outcome = "abort"
        try:
            await self._service.active.run(self._active, work, receive)
        except Exception as error:
            if isinstance(error, RequestError) and error.code == "deadline_exceeded":
                outcome = "timeout"
            if not self._started:
                raise
            await self._end_with(error, scope, send)
        finally:
            self._abort_unfinished(outcome)
            self._active.charge(self._num_completion_tokens)
            state["notes"] |= {
                "stream": self._call.stream,
                "prompt_tokens": self._active.num_prompt_tokens,
                "output_tokens": self._num_completion_tokens,
            }
            state["generated"] = self._told()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def keep(choice: Choice, delta: Delta) -> None:
            choice.add(delta)

        await self._each(keep)
        usage = self._usage()
        answer = await self._workers.run(
            self._num_scored_bytes(self._num_completion_tokens),
            lambda: errors.json_response(self._rendering.whole(self._choices, usage)),
        )
        await answer(scope, receive, send)

    async def _stream(self, send: Send, send_on: Send) -> None:
        async def show(choice: Choice, delta: Delta) -> None:
            events = self._rendering.chunk(choice, delta) if choice.begun else await self._begin(choice, delta)
            if events:
                if not self._started:
                    await self._start(send)
                await send_on({"type": "http.response.body", "body": events, "more_body": True})

        await self._each(show)
        tail = self._rendering.usage_chunk(self._usage()) if self._call.include_usage else b""
        if not self._started:
            await self._start(send)
        await send_on({"type": "http.response.body", "body": tail + self._rendering.done, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, choice: Choice, delta: Delta) -> bytes:
        choice.begun = True
        begin = await self._workers.run(self._num_scored_bytes(0), lambda: self._rendering.begin(choice))
        return begin + self._rendering.chunk(choice, delta)

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})

    def _num_scored_bytes(self, num_completion_tokens: int) -> int:
        """About what the log-probabilities take that were asked for: they alone make an answer large."""
        params = self._call.params
        num_prompt_tokens = sum(len(stream.prompt_token_ids) for stream in self._streams)
        candidates = 0 if params.prompt_logprobs is None else num_prompt_tokens * (params.prompt_logprobs + 1)
        candidates += 0 if params.logprobs is None else num_completion_tokens * (params.logprobs + 1)
        return candidates * CANDIDATE_BYTES

    async def _end_with(self, error: Exception, scope: Scope, send: Send) -> None:
        """The stream has begun, so its status stands: say what went wrong as an event, and close."""
        state = scope["state"]
        state["notes"]["error"] = errors.name_of(error)
        if isinstance(error, errors.ClientGone):
            return
        if not isinstance(error, RequestError):
            log.error("event=stream_failed id=%s", state["request_id"], exc_info=error)
        last = self._rendering.failure(errors.error_body(error, state["request_id"])["error"])
        await send({"type": "http.response.body", "body": last})

    async def _each(self, take: Take) -> None:
        """Hand every delta to `take` with its choice, as they come; ends when every choice has finished, or raises."""
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                await take(*self._noted(0, delta))
        else:
            async with aclosing(merged(self._streams)) as deltas:
                async for prompt_index, delta in deltas:
                    await take(*self._noted(prompt_index, delta))
        if any(choice.finish_reason is None for choice in self._choices):
            raise RuntimeError("the engine closed a stream before its sequences had finished")

    def _noted(self, prompt_index: int, delta: Delta) -> tuple[Choice, Delta]:
        """A delta that has come, as it is to be shown, and the choice that grows by it."""
        choice = self._choices[prompt_index * self._call.params.n + delta.index]
        if self._score_only:
            delta = _Unshown(delta.index)
        choice.finish_reason = delta.finish_reason
        num_tokens = len(delta.token_ids)
        choice.num_tokens += num_tokens
        self._num_completion_tokens += num_tokens
        self._active.num_output_tokens = self._num_completion_tokens
        return choice, delta

    def _told(self) -> Generated:
        operations = {CompletionCall: "text_completion", ChatCall: "chat", EmbeddingCall: "embeddings"}
        return Generated(
            operations[type(self._call)],
            self._service.engine.model_name,
            self._active.id,
            self._call.params,
            tuple(stream.request_id for stream in self._streams),
            self._active.num_prompt_tokens,
            sum(stream.num_cached_tokens for stream in self._streams),
            self._num_completion_tokens,
            tuple(choice.finish_reason for choice in self._choices if choice.finish_reason is not None),
        )

    def _usage(self) -> dict[str, Any]:
        return openai.usage(self._streams, self._num_completion_tokens)

    def _abort_unfinished(self, outcome: str) -> None:
        unfinished = {id(choice.stream) for choice in self._choices if choice.finish_reason is None}
        for stream in self._streams:
            if id(stream) in unfinished:
                stream.abort(outcome)


@dataclass(frozen=True, slots=True)
class _Unshown:
    """The end of a scored prompt, without the token that the engine had to make and without why that one ended."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: None = None
    finish_reason: str = FinishReason.LENGTH
    stop_reason: None = None


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(stream's position, delta) of all streams as they come. The first error ends it."""
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
    pumps = [asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(i: int, stream: Stream, queue: "asyncio.Queue[tuple[int, Delta] | Exception | None]") -> None:
    try:
        async for delta in stream:
            queue.put_nowait((i, delta))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
