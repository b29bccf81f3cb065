"""What a part of the check gives: a list of named checks, each of which gives figures or says why there are none."""

from collections.abc import Callable
from typing import Any, NamedTuple

Figures = dict[str, Any]


class Check(NamedTuple):
    """`run()` gives figures. Raises Refused where a backend says that it can't, Skipped where something is not here,
    and AssertionError for a wrong result. It may hang: `limit_s` is the time after which it is killed."""

    name: str
    run: Callable[[], Figures]
    limit_s: float = 90.0


class Refused(Exception):
    """A backend does not take this, and says why."""


class Skipped(Exception):
    """What the check needs is not on this machine."""
