"""Server-sent events: headers and framing.

The chunks of one choice differ only in a text, so what is constant of them is encoded once (`Template`), and a token
costs one small `orjson.dumps` and a concatenation: 0.3 us instead of 1.5.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
# Stands for the open text in the body given to `template`; it must come after every other text that callers choose.
HOLE = "\N{OBJECT REPLACEMENT CHARACTER}"


class Template(NamedTuple):
    """An event with one text left open."""

    before: bytes
    after: bytes

    def fill(self, text: str) -> bytes:
        return self.before + orjson.dumps(text) + self.after


def event(body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def failure(error: Mapping[str, Any]) -> bytes:
    """What ends a stream of chunks that has failed; `error` is as in errors.error_body."""
    return event({"error": error})


def template(body: Any) -> Template:
    before, _, after = event(body).rpartition(orjson.dumps(HOLE))
    return Template(before, after)
