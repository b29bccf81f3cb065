"""Checks of JSON values. Each returns the value in its Python type or raises RequestError naming the field."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pagedjax.core.errors import RequestError

Check = Callable[[Any, str], Any]

# More than JSON's writers, templates and compilers of schemas can follow in their own recursion is of no use.
MAX_DEPTH = 100
BODY = "the request body"  # which is no field


def boolean(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(value, name, "true or false")
    return value


def integer(value: Any, name: str) -> int:
    # JSON's reader gives integers of more than 64 bits as floats; whoever knows the range refuses them with it.
    if isinstance(value, float) and abs(value) >= 2**63 and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(value, name, "an integer")
    return value


def number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(value, name, "a number")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{name} is too large a number", param=name) from None


def string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise wrong(value, name, "a string")
    return value


def array(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(value, name, "an array")
    return value


def record(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(value, name, "an object")
    return value


def shallow_record(value: Any, name: str) -> dict[str, Any]:
    """An object that others will walk through, whatever it holds: nested at most MAX_DEPTH deep."""
    found = record(value, name)
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _members(outer) if isinstance(inner, dict | list)]
        if not level:
            return found
    raise RequestError(f"{name} is nested more than {MAX_DEPTH} deep", param=name)


def _members(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def strings(value: Any, name: str) -> tuple[str, ...]:
    """A string or an array of strings."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong(value, name, "a string or an array of strings")
    return tuple(string(item, f"{name}[{i}]") for i, item in enumerate(array(value, name)))


def integers(value: Any, name: str) -> tuple[int, ...]:
    return tuple(integer(item, f"{name}[{i}]") for i, item in enumerate(array(value, name)))


def one_of(*allowed: Any) -> Check:
    """Only these values, which ask for what the server does anyway."""

    def check(value: Any, name: str) -> Any:
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise unsupported(name, value)
        return value

    return check


def refused(value: Any, name: str) -> Any:
    raise unsupported(name)


def known_fields(
    body: dict[str, Any], table: Mapping[str, Check], prefix: str = "", *, lenient: bool = False
) -> dict[str, Any]:
    """The fields that are not null, each checked. Unknown ones are refused, or passed over where that is wanted."""
    unknown = next((name for name in body if name not in table), None)
    if unknown is not None and not lenient:
        name = f"{prefix}{unknown[:100]}"
        raise RequestError(f"unrecognized field {name}", param=name, code="unknown_parameter")
    given = [(name, value) for name, value in body.items() if value is not None and name in table]
    return {name: table[name](value, f"{prefix}{name}") for name, value in given}


def required(given: Mapping[str, Any], name: str, prefix: str = "") -> Any:
    if name not in given:
        path = f"{prefix}{name}"
        raise RequestError(f"{path} is required", param=path, code="missing_required_parameter")
    return given[name]


def wrong(value: Any, name: str, wanted: str) -> RequestError:
    param = None if name == BODY else name
    return RequestError(f"{name} must be {wanted}, not {kind_of(value)}", param=param, code="invalid_type")


def unsupported(name: str, value: Any = None) -> RequestError:
    shown = "" if value is None or isinstance(value, dict | list) else f" {value!r}"[:100]
    return RequestError(f"{name}{shown} is not supported by this server", param=name, code="unsupported_parameter")


def kind_of(value: Any) -> str:
    """JSON's word for the value's type."""
    kinds = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else kinds.get(type(value), "an object")
