"""The ways to ask for structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from collections.abc import Mapping
from typing import Any

from pagedjax.core.errors import RequestError
from pagedjax.core.structure import StructuredOutputsParams
from serving.requests import fields
from serving.requests.fields import Check, boolean, known_fields, record, required, string

# The fields below; a body that names one is read beside the event loop, since a grammar is compiled with it.
MARKS = (b"response_format", b"structured_outputs", b"guided_", b"tools", b"json_schema")


def response_format(value: Any, name: str) -> StructuredOutputsParams | None:
    """text (None), json_object or json_schema."""
    kind = required(record(value, name), "type", f"{name}.")
    if kind == "text":
        known_fields(value, {"type": string}, f"{name}.")
        return None
    if kind == "json_object":
        known_fields(value, {"type": string}, f"{name}.")
        return StructuredOutputsParams(json_object=True, param=name)
    if kind != "json_schema":
        raise fields.unsupported(f"{name}.type", kind)
    given = known_fields(value, {"type": string, "json_schema": record}, f"{name}.")
    return named_schema(required(given, "json_schema", f"{name}."), f"{name}.json_schema", name)


def named_schema(value: dict[str, Any], where: str, name: str) -> StructuredOutputsParams:
    """A schema with its name, found at `where` in the field `name`."""
    known: dict[str, Check] = {"name": string, "description": string, "schema": schema, "strict": boolean}
    given = known_fields(value, known, f"{where}.")
    required(given, "name", f"{where}.")
    return StructuredOutputsParams(json=given.get("schema", {}), param=name)


def structured_outputs(value: Any, name: str) -> StructuredOutputsParams:
    """vLLM's object: one of json, regex, choice, grammar and json_object."""
    return StructuredOutputsParams(**known_fields(record(value, name), _STRUCTURED, f"{name}."), param=name)


def schema(value: Any, name: str) -> Any:
    """A JSON schema: an object, true or false, or one of these as text."""
    if not isinstance(value, dict | bool | str):
        raise fields.wrong(value, name, "a JSON schema")
    return value


def wish(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What the checked fields ask for together. Raises RequestError where that is two things."""
    found = [(name, given[name]) for name in ("response_format", "structured_outputs") if given.get(name)]
    pattern = given.get("guided_whitespace_pattern")
    for name, kind in _GUIDED_KINDS.items():
        if name in given:
            options = {kind: given[name], "whitespace_pattern": pattern if kind == "json" else None}
            found.append((name, StructuredOutputsParams(**options, param=name)))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestError(f"{names} ask for two shapes at once; give one", param=found[1][0])
    if pattern is not None and "guided_json" not in given:
        raise RequestError("guided_whitespace_pattern needs guided_json", param="guided_whitespace_pattern")
    return found[0][1] if found else None


_STRUCTURED: dict[str, Check] = {
    "json": schema,
    "regex": string,
    "choice": lambda value, name: tuple(
        string(item, f"{name}[{i}]") for i, item in enumerate(fields.array(value, name))
    ),
    "grammar": string,
    "json_object": boolean,
    "whitespace_pattern": string,
    "disable_any_whitespace": fields.one_of(False),
    "disable_additional_properties": fields.one_of(False),
    "structural_tag": fields.refused,
}
_GUIDED_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
FIELDS: dict[str, Check] = {
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "guided_json": schema,
    "guided_regex": string,
    "guided_choice": _STRUCTURED["choice"],
    "guided_grammar": string,
    "guided_whitespace_pattern": string,
    "guided_decoding_backend": fields.one_of("auto", "guidance"),
}
