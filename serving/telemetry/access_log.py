"""One line for every request that was answered: among the log's lines as key=value, or as JSON on standard output.

A line says who asked what, how much and how long it took; there is no prompt, answer, key or query in it.
"""

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import orjson

AccessLogForm = Literal["text", "json", "off"]

log = logging.getLogger(__name__)
# Asked several times a second by pages and probes; 503 is one of their answers, not a fault.
POLLED = ("/health", "/ready", "/metrics", "/debug/state", "/debug/steps")


class Entry(NamedTuple):
    """A request that has been answered. `duration_s` is from its head to the answer's last byte, `first_byte_s` to the
    answer's first, None where there was none. `notes` is what the routes add: tokens, the key's name, what failed."""

    request_id: str
    method: str
    route: str
    status: int
    tenant: str | None
    duration_s: float
    first_byte_s: float | None
    notes: Mapping[str, Any]

    @property
    def is_polled(self) -> bool:
        return self.route in POLLED and self.status in (200, 503)


def write(form: AccessLogForm, entry: Entry) -> None:
    """Text goes by the log's level, in which what is polled counts as debugging; JSON has all else in any case."""
    if form == "text":
        log.log(logging.DEBUG if entry.is_polled else logging.INFO, "%s", as_text(entry))
    elif form == "json" and not entry.is_polled:
        log.info("%s", as_json(entry, time.time()))


def as_text(entry: Entry) -> str:
    fields = {"id": entry.request_id, "route": entry.route, "status": entry.status}
    fields["duration_s"] = f"{entry.duration_s:.4f}"
    return "event=request " + " ".join(f"{name}={value}" for name, value in (fields | dict(entry.notes)).items())


def as_json(entry: Entry, now_s: float) -> str:
    """`time` is when the answer ended, in seconds since 1970."""
    fields = {
        "time": round(now_s, 3),
        "request_id": entry.request_id,
        "method": entry.method,
        "route": entry.route,
        "status": entry.status,
        "tenant": entry.tenant,
        "duration_s": round(entry.duration_s, 6),
        "first_byte_s": entry.first_byte_s and round(entry.first_byte_s, 6),
    }
    return orjson.dumps(fields | dict(entry.notes)).decode()


def begin_json() -> None:
    """From now on this log's lines go to standard output, as they are and whatever level the others have."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)
