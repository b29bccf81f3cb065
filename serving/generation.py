"""One generating request from its streams to the client: collect or stream, and end early when it must.

A request ends early when its client goes (its sequences are aborted), when its time is up or the server gives up
waiting at shutdown (the client gets an error), or when the engine fails. Response headers wait for the first delta, so
that whatever goes wrong before it has its own status; after it an error is one more event, and the stream closes
without [DONE].
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from pagedjax.core.errors import RequestError
from pagedjax.core.request import FinishReason
from serving import errors, openai, sse
from serving.embedding import EmbeddingCall
from serving.interfaces import Delta, Stream
from serving.openai import Choice, Rendering
from serving.schemas import ChatCall, CompletionCall
from serving.tracing import Generated

if TYPE_CHECKING:
    from serving.service import Service

log = logging.getLogger(__name__)

# About what one candidate of a token's log-probabilities takes as JSON.
CANDIDATE_BYTES = 64


@dataclass(slots=True, eq=False)
class Active:
    """A request that is being answered, within `timeout_s` of `began_s` if there is a limit. `charge` is told at the
    end how many tokens were generated."""

    id: str
    tenant: str
    route: str
    num_prompt_tokens: int = 0
    num_sequences: int = 1
    charge: Callable[[int], None] = lambda num_tokens: None
    num_output_tokens: int = 0
    began_s: float = field(default_factory=time.monotonic)
    timeout_s: float | None = None


class ActiveRequests:
    """The generating requests that have not been answered yet."""

    def __init__(self) -> None:
        self._active: dict[str, tuple[Active, Callable[[Exception], None]]] = {}
        self._num_sequences: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._active)

    def num_sequences(self, tenant: str) -> int:
        return self._num_sequences[tenant]

    def interrupt_all(self, error: Exception) -> None:
        """Ends every one of them with this error."""
        for _, interrupt in tuple(self._active.values()):
            interrupt(error)

    def cancel(self, request_id: str, tenant: str | None = None) -> bool:
        """End one with an error, if there is such a one, of this tenant if one is named."""
        active, interrupt = self._active.get(request_id, (None, None))
        if active is None or interrupt is None or tenant not in (None, active.tenant):
            return False
        interrupt(errors.cancelled())
        return True

    def listing(self) -> list[dict[str, Any]]:
        """What is known of each, oldest first; no texts."""
        now_s = time.monotonic()
        return [
            {
                "id": one.id,
                "tenant": one.tenant,
                "route": one.route,
                "age_s": round(now_s - one.began_s, 3),
                "prompt_tokens": one.num_prompt_tokens,
                "output_tokens": one.num_output_tokens,
            }
            for one, _ in self._active.values()
        ]

    async def run(self, active: Active, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """`work`, until the client goes (ClientGone), its time is up or somebody ends it (with an error)."""
        loop = asyncio.get_running_loop()
        interrupted: asyncio.Future[Exception] = loop.create_future()

        def interrupt(error: Exception) -> None:
            if not interrupted.done():
                interrupted.set_result(error)

        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_until_disconnect(receive))
        timer = None
        if active.timeout_s is not None:
            left_s = active.began_s + active.timeout_s - time.monotonic()
            timer = loop.call_later(max(left_s, 0), interrupt, errors.deadline_exceeded(active.timeout_s))
        self._active[active.id] = active, interrupt
        self._num_sequences[active.tenant] += active.num_sequences
        try:
            await asyncio.wait((working, watching, interrupted), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise interrupted.result() if interrupted.done() else errors.ClientGone
            working.result()
        finally:
            del self._active[active.id]
            self._num_sequences[active.tenant] -= active.num_sequences
            if not self._num_sequences[active.tenant]:
                del self._num_sequences[active.tenant]
            if timer is not None:
                timer.cancel()
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)


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
        self._num_completion_tokens = 0
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes = scope["state"]["notes"]
        work = self._stream(send) if self._call.stream else self._whole(scope, receive, send)
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
            notes["stream"] = self._call.stream
            notes["prompt_tokens"] = self._active.num_prompt_tokens
            notes["output_tokens"] = self._num_completion_tokens
            scope["state"]["generated"] = self._told()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas()) as deltas:
            async for choice, delta in deltas:
                choice.add(delta)
        usage = self._usage()
        answer = await self._workers.run(
            self._num_scored_bytes(self._num_completion_tokens),
            lambda: errors.json_response(self._rendering.whole(self._choices, usage)),
        )
        await answer(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._deltas()) as deltas:
            async for choice, delta in deltas:
                begin = b"" if choice.begun else await self._begin(choice)
                await self._write(begin + self._rendering.chunk(choice, delta), send)
        tail = self._rendering.usage_chunk(self._usage()) if self._call.include_usage else b""
        await self._write(tail + self._rendering.done, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, choice: Choice) -> bytes:
        choice.begun = True
        return await self._workers.run(self._num_scored_bytes(0), lambda: self._rendering.begin(choice))

    def _num_scored_bytes(self, num_completion_tokens: int) -> int:
        """About what the log-probabilities take that were asked for: they alone make an answer large."""
        params = self._call.params
        num_prompt_tokens = sum(len(stream.prompt_token_ids) for stream in self._streams)
        candidates = 0 if params.prompt_logprobs is None else num_prompt_tokens * (params.prompt_logprobs + 1)
        candidates += 0 if params.logprobs is None else num_completion_tokens * (params.logprobs + 1)
        return candidates * CANDIDATE_BYTES

    async def _write(self, events: bytes, send: Send) -> None:
        if not events:
            return
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
        await send({"type": "http.response.body", "body": events, "more_body": True})

    async def _end_with(self, error: Exception, scope: Scope, send: Send) -> None:
        """The stream has begun, so its status stands: say what went wrong as an event, and close."""
        state = scope["state"]
        state["notes"]["error"] = errors.name_of(error)
        if isinstance(error, errors.ClientGone):
            return
        if not isinstance(error, RequestError):
            log.error("event=stream_failed id=%s", state["request_id"], exc_info=error)
        await send({"type": "http.response.body", "body": sse.event(errors.error_body(error, state["request_id"]))})

    async def _deltas(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Every delta with its choice, as they come; ends when every choice has finished, or raises."""
        async with aclosing(merged(self._streams)) as deltas:
            async for prompt_index, delta in deltas:
                choice = self._choices[prompt_index * self._call.params.n + delta.index]
                if isinstance(self._call, CompletionCall) and self._call.score_only:
                    delta = _Unshown(delta.index)
                choice.finish_reason = delta.finish_reason
                self._num_completion_tokens += len(delta.token_ids)
                self._active.num_output_tokens = self._num_completion_tokens
                yield choice, delta
        if any(choice.finish_reason is None for choice in self._choices):
            raise RuntimeError("the engine closed a stream before its sequences had finished")

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
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
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


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
