"""A conversation in the terminal, with an engine in this process or with any server that speaks OpenAI's API.

Both are an `Ask`: a function that takes the messages so far and writes the answer piece by piece. Ctrl-C stops an
answer and keeps what was said of it; Ctrl-D or /quit leaves; /reset forgets the conversation.
"""

import asyncio
import http.client
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.core.request import SamplingParams

Message = dict[str, str]
Write = Callable[[str], None]
Ask = Callable[[list[Message], Write], None]

COMMANDS = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


class OutputClosed(Exception):
    """Nobody reads standard output any more. (Not an OSError: those are the connection's.)"""


def converse(ask: Ask, *, system: str | None = None) -> bool:
    """Read lines from standard input and answer each until the input ends. Prompts are shown on a terminal only.

    Gives False if a question was refused and nobody sat at a terminal to see it. Raises BrokenPipeError.
    """
    on_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are no UTF-8 are a fault of their line, not of the whole input.
        sys.stdin.reconfigure(errors="surrogateescape")
    num_refused = 0
    if on_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        print(COMMANDS)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (line := _read_line("\n> " if on_terminal else "")) is not None:
        if line in ("/quit", "/exit"):
            break
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            print(f"Unknown command {line.split()[0]}. {COMMANDS}", file=sys.stderr)
        elif line:
            num_messages = len(messages)
            messages = _turn(ask, [*messages, {"role": "user", "content": line}])
            num_refused += len(messages) == num_messages
    return on_terminal or not num_refused


@contextmanager
def local(engine: Any, sampling: dict[str, Any]) -> Iterator[Ask]:
    """Answers from an engine in this process. It starts on entry, which takes a while, and stops on exit."""
    params = SamplingParams(**sampling)
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            yield lambda messages, write: runner.run(_generate(engine, messages, params, write))
        finally:
            runner.run(engine.stop())


@contextmanager
def remote(
    url: str, sampling: dict[str, Any], *, model: str | None = None, api_key: str | None = None
) -> Iterator[Ask]:
    """Answers from the server at `url` (with or without /v1), by its first model unless `model` names one.

    Raises ConfigError if none answers there, RequestError for sampling that no server takes.
    """
    SamplingParams(**sampling)
    url = url.rstrip("/").removesuffix("/v1")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with _request(url, "GET", "/v1/models", headers) as response:
            model = model or json.load(response)["data"][0]["id"]
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise ConfigError(f"no server that speaks OpenAI's API answers at {url}: {error}; check --url") from error

    def ask(messages: list[Message], write: Write) -> None:
        body = {name: value for name, value in sampling.items() if value is not None}
        body |= {"model": model, "messages": messages, "stream": True}
        try:
            with _request(url, "POST", "/v1/chat/completions", headers, json.dumps(body)) as response:
                for piece in _pieces(response):
                    write(piece)
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"the server at {url} broke off: {error}") from error

    yield ask


def _turn(ask: Ask, messages: list[Message]) -> list[Message]:
    """Ask once and show the answer; gives the conversation with it, or without the question if it was refused."""
    answer: list[str] = []

    def write(piece: str) -> None:
        answer.append(piece)
        try:
            print(piece, end="", flush=True)
        except BrokenPipeError as error:
            raise OutputClosed from error

    try:
        _check_text(messages[-1]["content"])
        ask(messages, write)
    except OutputClosed as error:
        raise BrokenPipeError from error
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        hint = " (/reset starts anew)" if error.code == "context_length_exceeded" else ""
        print(f"{error}{hint}", file=sys.stderr)
        return messages[:-1]
    print(flush=True)
    return [*messages, {"role": "assistant", "content": "".join(answer)}]


def _check_text(text: str) -> None:
    """Raises RequestError for bytes that are no UTF-8, which Python reads as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the line is not valid UTF-8 at character {error.start + 1}") from error


def _read_line(prompt: str) -> str | None:
    """The next line without its outer white space, or None at the input's end. Ctrl-C gives an empty line."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


async def _generate(engine: Any, messages: list[Message], params: SamplingParams, write: Write) -> None:
    stream = engine.submit(engine.tokenizer.encode_chat(messages), params)
    try:
        async for delta in stream:
            write(delta.text)
    finally:
        stream.abort()


@contextmanager
def _request(url: str, method: str, path: str, headers: dict[str, str], body: str | None = None) -> Iterator[Any]:
    """The open response; leaving closes the connection. Raises RequestError for an error status."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url} must begin with http:// or https://")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with closing(kind(parts.hostname, parts.port)) as connection:
        connection.request(method, parts.path + path, body, headers)
        with connection.getresponse() as response:
            if response.status != 200:
                raise _refusal(response.status, response.read())
            yield response


def _refusal(status: int, body: bytes) -> RequestError:
    with suppress(ValueError, LookupError, TypeError):
        error = json.loads(body)["error"]
        return RequestError(error["message"], param=error.get("param"), code=error.get("code"))
    return RequestError(f"the server answered {status}: {body[:200].decode(errors='replace')}")


def _pieces(response: Any) -> Iterator[str]:
    """The text of each server-sent event, up to [DONE]."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        event = line[5:].strip()
        if event == b"[DONE]":
            return
        chunk = json.loads(event)
        if "error" in chunk:
            raise _refusal(200, event)
        for choice in chunk.get("choices", ()):
            yield choice["delta"].get("content") or ""
