"""What a model is given: the prompts of a completion, the messages of a chat."""

from dataclasses import dataclass
from typing import Any

from pagedjax.core.errors import RequestError
from serving.options import ApiOptions
from serving.requests import fields
from serving.requests.fields import Check, known_fields, record, refused, required, string
from serving.tools.tools import read_message_calls

MAX_PROMPTS = 256
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What parsing must know of the model and the server. Lengths in tokens."""

    name: str
    vocab_size: int
    max_model_len: int
    options: ApiOptions = ApiOptions()


def read_prompts(value: Any, model: ModelFacts, name: str = "prompt") -> tuple[Prompt, ...]:
    """A string, strings, token ids, or arrays of token ids, from the field `name`."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and type(value[0]) is int:
        return (_prompt_ids(value, model, name),)
    if not isinstance(value, list) or not value:
        raise RequestError(f"{name} must be a string, or a non-empty array of strings or token ids", param=name)
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"{name} holds {len(value)} prompts, at most {MAX_PROMPTS} are allowed", param=name)
    if not all(type(item) is type(value[0]) for item in value):
        raise RequestError(f"{name} mixes types; give strings only or arrays of token ids only", param=name)
    if isinstance(value[0], str):
        return tuple(value)
    return tuple(_prompt_ids(item, model, name) for item in value)


def _prompt_ids(value: Any, model: ModelFacts, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{name} of token ids must be a non-empty array of integers", param=name)
    if len(value) >= model.max_model_len:
        message = (
            f"the {name} has {len(value)} tokens and the context holds {model.max_model_len}, "
            f"of which at least one is generated; shorten the {name}"
        )
        raise RequestError(message, param=name, code="context_length_exceeded")
    if not all(type(item) is int for item in value):
        raise RequestError(f"{name} of token ids must hold integers only", param=name, code="invalid_type")
    check_ids(value, name, model)
    return tuple(value)


def check_ids(token_ids: Any, name: str, model: ModelFacts) -> None:
    """Token ids (or the keys of a bias) must be in the vocabulary."""
    beyond = next((i for i in token_ids if not 0 <= i < model.vocab_size), None)
    if beyond is not None:
        message = f"{name} holds token id {beyond}; the vocabulary has ids 0..{model.vocab_size - 1}"
        raise RequestError(message, param=name, code="invalid_token_id")


def read_messages(values: list[Any], model: ModelFacts) -> tuple[dict[str, Any], ...]:
    if not values:
        raise RequestError("messages must hold at least one message", param="messages")
    if len(values) > model.max_model_len:
        # Each takes a token at least; a hundred thousand would be rendered for a second only to be refused.
        message = f"{len(values)} messages are more than a context of {model.max_model_len} tokens can hold"
        raise RequestError(message, param="messages", code="context_length_exceeded")
    return tuple(_message(value, i, lenient=model.options.lenient) for i, value in enumerate(values))


def _message(value: Any, i: int, *, lenient: bool) -> dict[str, Any]:
    """One message in the template's shape. `developer` is the newer name of `system`."""
    where = f"messages[{i}]"
    known: dict[str, Check] = {
        "role": string,
        "content": _content,
        "name": string,
        "tool_calls": read_message_calls,
        "tool_call_id": string,
        **dict.fromkeys(("refusal", "audio", "function_call"), refused),
    }
    given = known_fields(record(value, where), known, f"{where}.", lenient=lenient)
    role = required(given, "role", f"{where}.")
    if role not in ROLES:
        message = f"{where}.role must be one of {', '.join(ROLES)}, not {role[:40]!r}"
        raise RequestError(message, param=f"{where}.role")
    if role == "tool":
        required(given, "tool_call_id", f"{where}.")
    for field, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if given.get(field) and role != owner:
            raise RequestError(f"{where}.{field} is for the role {owner}", param=f"{where}.{field}")
    kept = {field: given[field] for field in ("name", "tool_calls", "tool_call_id") if given.get(field)}
    content = given.get("content", "") if "tool_calls" in kept else required(given, "content", f"{where}.")
    return {"role": ROLES[role], "content": content, **kept}


def _content(value: Any, name: str) -> str:
    """A string, or text parts, joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise fields.wrong(value, name, "a string or a non-empty array of text parts")
    return "\n".join(_text_part(part, f"{name}[{i}]") for i, part in enumerate(value))


def _text_part(value: Any, name: str) -> str:
    kind = record(value, name).get("type")
    if kind != "text":
        raise fields.unsupported(f"{name}.type", kind)
    given = known_fields(value, {"type": string, "text": string}, f"{name}.")
    return str(required(given, "text", f"{name}."))
