"""A frozen configuration class as flags and as TOML keys, so that a field is described once.

A field's `metadata["help"]` is its help text, `metadata["group"]` its heading and `metadata["none"]` what None means
("auto" if it does not say). A field of type bool gives `--name` and `--no-name`; Literal types give choices.
"""

import argparse
import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pagedjax.core.errors import ConfigError

# Other engines' names for the same field.
ALIASES = {"max_num_seqs": ("--max-batch-size",), "max_model_len": ("--max-seq-len",)}


def option(default: Any, group: str, text: str, none: str = "auto") -> Any:
    """A field with this default and help text."""
    return dataclasses.field(default=default, metadata={"group": group, "help": text, "none": none})


def add_flags(parser: argparse.ArgumentParser, config_class: type, *, without: frozenset[str] = frozenset()) -> None:
    """Add a flag for every field of `config_class`, under headings, in the class's order."""
    groups: dict[str, Any] = {}
    hints = get_type_hints(config_class)
    for field in _fields(config_class, without):
        title = field.metadata.get("group", "engine")
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            flag_name(field.name),
            *ALIASES.get(field.name, ()),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(field),
            **_argument(hints[field.name]),
        )


def text(word: str) -> str:
    """A type for argparse: text that says something."""
    if not word.strip():
        raise argparse.ArgumentTypeError("is empty; drop it or give it a value")
    return word


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def default_text(field: dataclasses.Field[Any]) -> str:
    """A field's default as help and documentation show it."""
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return str(field.metadata.get("none", "auto"))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def read_toml(path: str | Path, types: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a TOML file, checked against `types`: name -> type. Keys may be written with - or _.

    Raises ConfigError for a file that can't be read, an unknown key or a value of the wrong type.
    """
    try:
        with open(path, "rb") as file:
            written = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}") from error
    settings = {}
    for key, value in written.items():
        name = key.replace("-", "_")
        if name not in types:
            raise ConfigError(f"--config {path}: unknown key {key!r}; known are {', '.join(sorted(types))}")
        if name in settings:
            raise ConfigError(f"--config {path}: {key!r} is set twice, with - and with _")
        settings[name] = _checked(f"--config {path}: {key}", value, types[name])
    return settings


def field_types(config_class: type) -> dict[str, Any]:
    hints = get_type_hints(config_class)
    return {field.name: hints[field.name] for field in _fields(config_class)}


def take(settings: dict[str, Any], config_class: type) -> dict[str, Any]:
    """Remove the settings that are fields of `config_class`, and give them."""
    return {field.name: settings.pop(field.name) for field in _fields(config_class) if field.name in settings}


def _fields(config_class: type, without: frozenset[str] = frozenset()) -> Iterator[dataclasses.Field[Any]]:
    return (field for field in dataclasses.fields(config_class) if field.init and field.name not in without)


def _help(field: dataclasses.Field[Any]) -> str:
    text = field.metadata["help"].replace("%", "%%")
    return text if field.default is dataclasses.MISSING else f"{text} (default: {default_text(field)})"


def _argument(hint: Any) -> dict[str, Any]:
    """argparse's keywords for a type."""
    kind, choices = _kind(hint)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if choices:
        return {"choices": choices}
    return {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}


def _kind(hint: Any) -> tuple[type, tuple[str, ...]]:
    """The scalar type under an optional one, and the allowed values of a Literal."""
    options = [o for o in get_args(hint) if o is not NoneType] if get_origin(hint) in (Union, UnionType) else [hint]
    if len(options) != 1:
        raise TypeError(f"a flag needs one type, not {hint}")
    (option,) = options
    if get_origin(option) is Literal:
        return str, get_args(option)
    if option not in (bool, int, float, str):
        raise TypeError(f"a flag can't have the type {hint}")
    return option, ()


def _checked(where: str, value: Any, hint: Any) -> Any:
    kind, choices = _kind(hint)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        raise ConfigError(f"{where} must be {words[kind]}, not {value!r}")
    if choices and value not in choices:
        raise ConfigError(f"{where} must be one of {', '.join(choices)}, not {value!r}")
    return value
