"""The OpenAPI document of the routes, made from the tables by which requests are read, and a page that shows it."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pagedjax
from pagedjax.core.request import MAX_LOGPROBS, MAX_N, MAX_PRIORITY, MIN_PRIORITY
from serving import admin, embedding, tokenizing
from serving.requests import fields, request_fields, response_call
from serving.requests.fields import Check

_BOOLEAN, _INTEGER, _NUMBER, _STRING = ({"type": kind} for kind in ("boolean", "integer", "number", "string"))
_STRINGS = {"anyOf": [_STRING, {"type": "array", "items": _STRING}]}
_OBJECT: dict[str, Any] = {"type": "object"}
_ARRAY: dict[str, Any] = {"type": "array", "items": {}}
_BY_CHECK: dict[Any, dict[str, Any]] = {
    fields.boolean: _BOOLEAN,
    fields.integer: _INTEGER,
    fields.number: _NUMBER,
    fields.string: _STRING,
    fields.strings: _STRINGS,
    fields.integers: {"type": "array", "items": _INTEGER},
    fields.array: _ARRAY,
    fields.record: _OBJECT,
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [_STRING, {"type": "array", "items": _OBJECT, "minItems": 1}, {"type": "null"}]},
    },
}
_FUNCTION = {"name": _STRING, "description": _STRING, "parameters": _OBJECT, "strict": _BOOLEAN}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": _FUNCTION},
    },
}
# A response's fields differ: its input holds items, not prompts, and its tools are flat.
_OF_RESPONSES: dict[str, dict[str, Any]] = {
    "input": {"anyOf": [_STRING, {**_ARRAY, "minItems": 1}]},
    "tools": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, **_FUNCTION},
        },
    },
}
_PROMPTS = {
    "anyOf": [
        _STRING,
        {"type": "array", "items": _STRING, "minItems": 1},
        {"type": "array", "items": _INTEGER, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": _INTEGER, "minItems": 1}, "minItems": 1},
    ]
}
_SCHEMA = {"anyOf": [_OBJECT, _BOOLEAN, _STRING]}
# What the check of a field cannot tell by itself.
_BY_NAME: dict[str, dict[str, Any]] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "prompt": _PROMPTS,
    "input": _PROMPTS,
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_N},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    "priority": {"type": "integer", "minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY},
    "max_completion_tokens": {"type": "integer", "minimum": 1},
    "logit_bias": {"type": "object", "additionalProperties": _NUMBER},
    "metadata": {"type": "object", "additionalProperties": _STRING, "maxProperties": 16},
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _BOOLEAN, "continuous_usage_stats": _BOOLEAN},
    },
    "seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": admin.MAX_PROFILE_S},
    "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": request_fields.MAX_TIMEOUT_S},
    "cache_salt": {"type": "string", "minLength": 1, "maxLength": request_fields.MAX_SALT_CHARS},
    "tools": {"type": "array", "items": _TOOL},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT]},
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": _OBJECT},
    },
    "structured_outputs": _OBJECT,
    "guided_json": _SCHEMA,
    "guided_choice": {"type": "array", "items": _STRING, "minItems": 1},
    "encoding_format": {"enum": ["float", "base64"]},
    "pooling": {"enum": ["last", "mean"]},
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def body_schema(table: Mapping[str, Check], required: list[str]) -> dict[str, Any]:
    """The schema of a body that is read by this table. `null` means absent, for every field."""
    special = _BY_NAME | (_OF_RESPONSES if table is response_call.FIELDS else {})
    properties = {
        name: _or_null(special.get(name) or _BY_CHECK.get(check, {}))
        for name, check in table.items()
        if check is not fields.refused
    }
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}


_BODIES: dict[str, tuple[str, Mapping[str, Check], list[str]]] = {
    "/v1/completions": ("Complete prompts", request_fields.COMPLETION, ["model", "prompt"]),
    "/v1/chat/completions": ("Answer a chat", request_fields.CHAT, ["model", "messages"]),
    "/v1/responses": ("Answer as OpenAI's responses do", response_call.FIELDS, ["model", "input"]),
    "/v1/embeddings": ("Vectors of texts", embedding.FIELDS, ["model", "input"]),
    "/tokenize": ("Token ids of a text or a chat", tokenizing.FIELDS, []),
    "/detokenize": ("The text of token ids", tokenizing.IDS, ["tokens"]),
    "/admin/profile": ("Have JAX profile the engine for some seconds", admin.PROFILE, []),
    "/admin/log-level": ("Show or set the least severe level that is logged", {"level": fields.string}, ["level"]),
}
_SUMMARIES = {
    "/v1/models": "The model that is served, and its limits",
    "/v1/models/{model}": "One model",
    "/v1/requests/{request_id}/cancel": "End one of your requests",
    "/health": "Whether the engine is alive",
    "/ready": "Whether new requests are taken",
    "/metrics": "Prometheus",
    "/debug/state": "The scheduler's state",
    "/debug/requests/{request_id}": "One request's whole life",
    "/debug/steps": "The latest steps, one by one",
    "/": "A page to chat and to watch",
    "/openapi.json": "This document",
    "/docs": "This document as a page",
    "/admin/drain": "Take no new requests",
    "/admin/queue": "What is being answered",
    "/admin/abort/{request_id}": "End a request",
    "/admin/reload-keys": "Read the API keys again",
}
_QUERIES: dict[str, dict[str, dict[str, Any]]] = {"/debug/steps": {"since": _INTEGER}}


@cache
def document(routes: tuple[tuple[str, frozenset[str]], ...]) -> dict[str, Any]:
    """OpenAPI 3.1 for these (path, methods)."""
    paths: dict[str, Any] = {}
    for path, methods in routes:
        path = path.replace(":path}", "}")
        paths[path] = {method.lower(): _operation(path, method) for method in sorted(methods - {"HEAD"})}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pagedjax", "version": pagedjax.__version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(path: str, method: str) -> dict[str, Any]:
    summary, table, required = _BODIES.get(path, (_SUMMARIES.get(path, ""), {}, []))
    error = {
        "description": "Refused",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "Done"}, "default": error}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": n, "in": "path", "required": True, "schema": _STRING} for n in names]
    parameters += [{"name": n, "in": "query", "schema": schema} for n, schema in _QUERIES.get(path, {}).items()]
    if parameters:
        operation["parameters"] = parameters
    if table and method != "GET":
        content = {"application/json": {"schema": body_schema(table, required)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
