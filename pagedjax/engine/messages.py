"""What goes to the step loop and what comes from it, whichever way it takes."""

from typing import NamedTuple

from pagedjax.engine.load import Load
from pagedjax.engine.outputs import Update
from pagedjax.engine.submission import Submission


class Add(NamedTuple):
    """Queue a request."""

    request: Submission


class Refuse(NamedTuple):
    """Tell whoever waits for this request what it was refused for."""

    request_id: str
    error: Exception


class Abort(NamedTuple):
    """Drop a request; `outcome` is what the metrics call it."""

    request_id: str
    outcome: str


class CountRefused(NamedTuple):
    """A request of this tenant was refused before it came here."""

    tenant: str


Command = Add | Refuse | Abort | CountRefused


class Stepped(NamedTuple):
    """What a step, or a refusal, brought, and which requests were taken in since the last report. `load` is None while
    the line and the number of running sequences are as they were."""

    updates: list[Update]
    taken_ids: list[str]
    load: Load | None


class Dropped(NamedTuple):
    """The engine knows an abort: nothing more comes of the request."""

    request_id: str


class Failed(NamedTuple):
    """The loop has ended by an error."""

    reason: str


Report = Stepped | Dropped | Failed
