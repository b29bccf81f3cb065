"""An op's backends in order of preference, and the choice among them with the reasons against the others."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Candidate(NamedTuple):
    """A backend (of the op's own kind, with a `name`), and `refuse(need)`: the reason why it can't do that, or None.

    One with `only_when_wished` is never chosen by itself.
    """

    backend: Any
    refuse: Callable[[Any], str | None]
    only_when_wished: bool = False


class Choice(NamedTuple):
    """The backend to use (of the op's own kind), and the reasons against the others by name, in order of preference."""

    backend: Any
    refused: Mapping[str, str]


def always(need: Any) -> None:
    """The `refuse` of a backend that can do everything."""


def first_able(op: str, candidates: tuple[Candidate, ...], need: Any, wish: str | None = None) -> Choice:
    """The first candidate that can do it, or the wished one.

    Raises ValueError for an unknown wish, and NotImplementedError, with the reasons, if the wished backend (or, without
    a wish, every one) refuses.
    """
    names = [candidate.backend.name for candidate in candidates]
    if wish is not None and wish not in names:
        raise ValueError(f"{op} has no backend {wish!r}; it has {', '.join(names)}")
    refused: dict[str, str] = {}
    chosen = None
    for name, candidate in zip(names, candidates):
        reason = candidate.refuse(need) or _passed_over(candidate, wish, chosen)
        if reason is None:
            chosen = candidate.backend
        else:
            refused[name] = reason
    if chosen is None:
        reasons = {wish: refused[wish]} if wish else refused
        raise NotImplementedError(f"{op}: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return Choice(chosen, MappingProxyType(refused))


def _passed_over(candidate: Candidate, wish: str | None, chosen: Any) -> str | None:
    if wish is not None:
        return None if candidate.backend.name == wish else f"{wish} is wished"
    if candidate.only_when_wished:
        return "runs only when wished for: it is slow"
    return None if chosen is None else f"{chosen.name} is preferred"
