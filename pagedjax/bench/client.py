"""The load generator's client: streams completions from any server with OpenAI's API and notes when text arrives.

It shares its cores with the server under test, so the path of a token is short: one read, one split, one JSON parse.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import orjson

from pagedjax.bench.metrics import Chunk, RequestRecord, Status
from pagedjax.bench.workload import BenchRequest
from pagedjax.core.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

MAX_ERROR_CHARS = 300
MAX_EVENT_BYTES = 1 << 24
_FETCH_TIMEOUT_S = 10.0
_PEAK_METRIC = "pagedjax_device_memory_peak_bytes"
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server and how to ask it. `api` is completions or chat; `timeout_s` bounds one whole request.

    `extra_body` is merged into every request last, so it can override any field.
    """

    url: str
    model: str
    api: str = "completions"
    api_key: str | None = None
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """The JSON body of a request. Token ids can only go to the completions API."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.max_tokens, "temperature": self.temperature}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | {"stream": True, "stream_options": {"include_usage": True}} | dict(self.extra_body)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Records of all requests that were sent, in the workload's order; `wall_s` ends with the last of them.

    `client_cpu_s` is the processor time of this process over the run.
    """

    records: tuple[RequestRecord, ...]
    wall_s: float
    interrupted: bool
    client_cpu_s: float


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int | None = None,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> LoadResult:
    """Send every request when it is due and wait for all.

    Faults of a request are part of its record. The first Ctrl-C ends the run early: what has been sent is recorded
    as interrupted. Raises ConfigError when aiohttp is missing.
    """
    http = import_aiohttp()
    records: dict[int, RequestRecord] = {}
    slots = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
    begin, cpu = perf_counter(), process_time()

    async def send(index: int, request: BenchRequest) -> None:
        await asyncio.sleep(request.due_s - (perf_counter() - begin))
        async with slots:
            # The record exists even if the run is interrupted while the request is under way.
            exchange = _Exchange(target, request, begin)
            try:
                await exchange.run(session)
            finally:
                records[index] = exchange.record()
                if on_record:
                    on_record(records[index])

    async with _session(http, target) as session:
        tasks = [asyncio.create_task(send(index, request)) for index, request in enumerate(requests)]
        interrupted = await _all_or_interrupt(tasks)
    end_s = max((record.end_s for record in records.values()), default=perf_counter() - begin)
    ordered = tuple(records[index] for index in sorted(records))
    return LoadResult(ordered, end_s, interrupted, process_time() - cpu)


async def served_models(url: str, api_key: str | None = None) -> list[str]:
    """Ids that the server lists under /v1/models. Raises ConfigError when it does not answer so."""
    body = await _fetch(url + "/v1/models", api_key)
    try:
        return [str(model["id"]) for model in orjson.loads(body)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url}/v1/models does not answer like an OpenAI server") from error


async def served_device_peak_bytes(url: str, api_key: str | None = None) -> int | None:
    """Peak device memory from the server's /metrics; None where it tells none."""
    try:
        body = await _fetch(url + "/metrics", api_key)
    except ConfigError:
        return None
    values = [
        line.split()[-1] for line in body.decode("utf-8", "replace").splitlines() if line.startswith(_PEAK_METRIC)
    ]
    return sum(int(float(value)) for value in values) if values else None


async def _fetch(url: str, api_key: str | None) -> bytes:
    http = import_aiohttp()
    try:
        async with (
            http.ClientSession(
                timeout=http.ClientTimeout(total=_FETCH_TIMEOUT_S), headers=_headers(api_key)
            ) as session,
            session.get(url) as response,
        ):
            body: bytes = await response.read()
    except (http.ClientError, TimeoutError, OSError) as error:
        raise ConfigError(f"no server answers at {url}: {_describe(error)}") from error
    if response.status != 200:
        raise ConfigError(f"{url} answers {response.status}: {error_text(body)}")
    return body


def normalise_url(url: str) -> str:
    """The server's base address, without a trailing slash or /v1. Raises ConfigError if it is no http address."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url} must begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def import_aiohttp() -> Any:
    """aiohttp, or a ConfigError that says how to get it."""
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError("the load client needs aiohttp; pip install 'pagedjax[bench]'") from error
    return aiohttp


class SseParser:
    """Splits a byte stream into the payloads of its server-sent events (their `data` fields)."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Payloads completed by this piece. Raises ValueError when one event exceeds MAX_EVENT_BYTES."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()


class _AnswerError(Exception):
    """The server answered, and says or shows that it failed."""


class _Exchange:
    """One request under way: collects what its record will say."""

    def __init__(self, target: Target, request: BenchRequest, begin: float) -> None:
        self._target, self._request, self._begin = target, request, begin
        self._start_s = perf_counter() - begin
        self._end_s: float | None = None
        self._chunks: list[Chunk] = []
        # Tokens since the last chunk; None once a server sends text without token ids.
        self._num_tokens: int | None = 0
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._is_complete = False
        self._error: str | None = None

    async def run(self, session: "aiohttp.ClientSession") -> None:
        """Send and read to the end; every fault of the server or the connection becomes the record's error."""
        try:
            async with session.post(
                self._target.url + _PATHS[self._target.api], data=orjson.dumps(self._target.body(self._request))
            ) as response:
                if response.status != 200:
                    self._error = f"HTTP {response.status}: {error_text(await response.read())}"
                else:
                    await self._read(response.content.iter_any())
        except TimeoutError:
            self._error = f"timed out after {self._target.timeout_s:g} s"
        except _AnswerError as error:
            self._error = str(error)
        except (import_aiohttp().ClientError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._error = _describe(error)
        self._end_s = perf_counter() - self._begin

    async def _read(self, pieces: AsyncIterator[bytes]) -> None:
        parser = SseParser()
        async for piece in pieces:
            now_s = perf_counter() - self._begin
            text_len = 0
            for payload in parser.feed(piece):
                if payload == b"[DONE]":
                    self._is_complete = True
                    break
                text_len += self._take(orjson.loads(payload))
            # Events that arrive together are one chunk: the reader could not have seen the first any sooner.
            if text_len:
                self._chunks.append(Chunk(now_s, text_len, self._num_tokens))
                self._num_tokens = 0
            if self._is_complete:
                break
        if not self._is_complete and self._finish_reason is None:
            raise _AnswerError("the stream ended early")
        if not self._chunks:
            raise _AnswerError("the response carries no text")

    def _take(self, event: dict[str, Any]) -> int:
        """Note one event; the length of its text in characters."""
        if event.get("error"):
            raise _AnswerError(error_text(orjson.dumps(event)))
        if event.get("usage"):
            self._usage = event["usage"]
        text_len = 0
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            self._num_tokens = _add_tokens(self._num_tokens, choice.get("token_ids"), text)
            text_len += len(text)
        return text_len

    def record(self) -> RequestRecord:
        """The record so far; a request without an end was interrupted."""
        status = Status.FAILED if self._error else Status.OK if self._end_s is not None else Status.INTERRUPTED
        details = self._usage.get("prompt_tokens_details") or {}
        return RequestRecord(
            due_s=self._request.due_s,
            start_s=self._start_s,
            end_s=self._end_s if self._end_s is not None else perf_counter() - self._begin,
            chunks=tuple(self._chunks),
            prompt_len=self._usage.get("prompt_tokens") or self._request.prompt_len,
            output_len=self._usage.get("completion_tokens") or _count(self._chunks),
            cached_len=details.get("cached_tokens"),
            finish_reason=self._finish_reason,
            status=status,
            error=self._error,
        )


def error_text(body: bytes) -> str:
    """The message of an error body, or its beginning where it is not OpenAI's."""
    with suppress(ValueError, KeyError, TypeError):
        error = orjson.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:MAX_ERROR_CHARS]
    return body.decode("utf-8", "replace")[:MAX_ERROR_CHARS]


def _add_tokens(num_tokens: int | None, token_ids: Sequence[int] | None, text: str) -> int | None:
    if token_ids is None:
        return None if text else num_tokens
    return None if num_tokens is None else num_tokens + len(token_ids)


def _count(chunks: Sequence[Chunk]) -> int:
    return sum(1 if chunk.num_tokens is None else chunk.num_tokens for chunk in chunks)


def _session(http: Any, target: Target) -> "aiohttp.ClientSession":
    # A connection each: a server may close an idle one just as the next request takes it.
    session: aiohttp.ClientSession = http.ClientSession(
        connector=http.TCPConnector(limit=0, force_close=True),
        timeout=http.ClientTimeout(total=target.timeout_s),
        headers=_headers(target.api_key) | {"Content-Type": "application/json"},
        read_bufsize=1 << 20,
    )
    return session


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS] if str(error) else type(error).__name__


async def _all_or_interrupt(tasks: Sequence[asyncio.Task[None]]) -> bool:
    """Wait for all tasks, or until Ctrl-C and then cancel the rest; whether that happened."""
    loop, interrupt = asyncio.get_running_loop(), asyncio.Event()
    with suppress(ValueError, RuntimeError, NotImplementedError):  # not on the main thread
        loop.add_signal_handler(signal.SIGINT, interrupt.set)
    watch = asyncio.create_task(interrupt.wait())
    try:
        everything = asyncio.gather(*tasks)
        await asyncio.wait((everything, watch), return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(asyncio.CancelledError):
            await everything
    finally:
        watch.cancel()
        with suppress(ValueError, RuntimeError, NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    return interrupt.is_set()
