"""What the two generating endpoints accept: pure parsing from a JSON value to a call.

Every field of OpenAI's schema is honoured or refused by name, and so is a field it does not have. `null` means absent.
The tables below are the whole list. Fields that are checked and then have no effect are those that cannot change an
output here: who asks (`user`, `safety_identifier`, `metadata`), hints (`prompt_cache_key`), and values that name what
the server does anyway (`store: false`, `response_format: {"type": "text"}`, `tool_choice: "none"`, …).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagedjax.core.errors import RequestError
from pagedjax.core.request import MAX_LOGPROBS, MAX_PRIORITY, MIN_PRIORITY, SamplingParams
from serving import fields
from serving.fields import Check, boolean, integer, number, one_of, record, refused, string

MAX_PROMPTS = 256
MAX_CHOICES = 1024
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What parsing must know of the model. Lengths in tokens."""

    name: str
    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """`logprobs` and `prompt_logprobs` are what to show; `params` may ask the engine for more. `score_only` is
    `max_tokens: 0` with echo: the prompt is scored, and the one token that the engine must make is not shown."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    score_only: bool = False
    stream: bool = False
    include_usage: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """`messages` hold role, content and where given name, as chat templates expect them. `logprobs` is the number
    of alternatives to show beside each token, or None."""

    messages: tuple[dict[str, str], ...]
    params: SamplingParams
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    priority: int = 0


def parse_completion(body: Any, model: ModelFacts) -> CompletionCall:
    """Raises RequestError naming the field."""
    given = _checked(body, _COMPLETION, model)
    prompts = _prompts(_required(given, "prompt"), model)
    echo = given.get("echo", False)
    logprobs, prompt_logprobs = given.get("logprobs"), given.get("prompt_logprobs")
    score_only = echo and given.get("max_tokens") == 0
    sampling = {name: given[name] for name in _SAMPLING if name in given} | {"logprobs": logprobs}
    if score_only:
        sampling |= {"max_tokens": 1, "min_tokens": 0}
    params = SamplingParams(**sampling)
    if echo and logprobs is not None:
        params = replace(params, prompt_logprobs=max(logprobs, prompt_logprobs or 0))
    _check_best_of(given, params.n)
    _check_num_choices(params.n, len(prompts))
    shown = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "echo": echo, "score_only": score_only}
    return CompletionCall(prompts=prompts, params=params, **shown, **_delivery(given))


def parse_chat(body: Any, model: ModelFacts) -> ChatCall:
    """Raises RequestError naming the field."""
    given = _checked(body, _CHAT, model)
    messages = _messages(_required(given, "messages"), model)
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    sampling["max_tokens"] = given.get("max_completion_tokens", given.get("max_tokens"))
    logprobs = _top_logprobs(given)
    params = SamplingParams(**sampling, logprobs=logprobs)
    shown: dict[str, Any] = {"logprobs": logprobs, "prompt_logprobs": given.get("prompt_logprobs")}
    return ChatCall(messages=messages, params=params, **shown, **_delivery(given))


# ---- fields ----------------------------------------------------------------------------------------------------------


def _logit_bias(value: Any, name: str) -> dict[int, float]:
    bias = {}
    for key, amount in record(value, name).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise RequestError(f"{name} key {key!r} is not a token id", param=name)
        bias[int(key)] = number(amount, f"{name}[{key}]")
    return bias


def _metadata(value: Any, name: str) -> dict[str, str]:
    pairs = record(value, name)
    if len(pairs) > 16 or any(len(key) > 64 for key in pairs):
        raise RequestError(f"{name} may have 16 keys of 64 characters", param=name)
    if any(len(string(item, name)) > 512 for item in pairs.values()):
        raise RequestError(f"{name} values may have 512 characters", param=name)
    return pairs


def _priority(value: Any, name: str) -> int:
    if not MIN_PRIORITY <= integer(value, name) <= MAX_PRIORITY:
        raise RequestError(f"{name} must lie in {MIN_PRIORITY}..{MAX_PRIORITY}, not {value}", param=name)
    return int(value)


def _at_least_one(value: Any, name: str) -> int:
    if integer(value, name) < 1:
        raise RequestError(f"{name} must be an integer at least 1, not {value}", param=name)
    return int(value)


def _stream_options(value: Any, name: str) -> bool:
    """Whether to send usage. OpenAI's obfuscation of chunk sizes is not done here, so only false can be asked."""
    known: dict[str, Check] = {"include_usage": boolean, "include_obfuscation": one_of(False)}
    return bool(_known(record(value, name), known, f"{name}.").get("include_usage", False))


_SAMPLING: dict[str, Check] = {
    "n": integer,
    "temperature": number,
    "top_p": number,
    "top_k": integer,
    "min_p": number,
    "seed": integer,
    "repetition_penalty": number,
    "presence_penalty": number,
    "frequency_penalty": number,
    "logit_bias": _logit_bias,
    "stop": fields.strings,
    "stop_token_ids": fields.integers,
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
    "max_tokens": integer,
    "min_tokens": integer,
    "prompt_logprobs": integer,
    "skip_special_tokens": boolean,
}
_DELIVERY: dict[str, Check] = {
    "model": string,
    "stream": boolean,
    "stream_options": _stream_options,
    "priority": _priority,
    "user": string,
}
_COMPLETION: dict[str, Check] = {
    **_SAMPLING,
    **_DELIVERY,
    "prompt": lambda value, name: value,
    "echo": boolean,
    "logprobs": integer,
    "best_of": integer,
    "suffix": refused,
}
_CHAT: dict[str, Check] = {
    **_SAMPLING,
    **_DELIVERY,
    "messages": fields.array,
    "logprobs": boolean,
    "top_logprobs": integer,
    "max_tokens": _at_least_one,
    "max_completion_tokens": _at_least_one,
    "metadata": _metadata,
    "safety_identifier": string,
    "prompt_cache_key": string,
    "parallel_tool_calls": boolean,
    "store": one_of(False),
    "service_tier": one_of("auto", "default"),
    "modalities": one_of(["text"]),
    "response_format": one_of({"type": "text"}),
    "reasoning_effort": one_of("none"),
    "verbosity": one_of("medium"),
    "prompt_cache_retention": one_of("in_memory"),
    "tools": one_of([]),
    "tool_choice": one_of("none", "auto"),
    "functions": one_of([]),
    "function_call": one_of("none", "auto"),
    "audio": refused,
    "moderation": refused,
    "prediction": refused,
    "prompt_cache_options": refused,
    "web_search_options": refused,
}


def _checked(body: Any, table: Mapping[str, Check], model: ModelFacts) -> dict[str, Any]:
    given = _known(record(body, "the request body"), table)
    name = _required(given, "model")
    if name != model.name:
        message = f"the model {name[:100]!r} does not exist; this server has {model.name!r}"
        raise RequestError(message, param="model", code="model_not_found")
    if "stream_options" in given and not given.get("stream"):
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if "prompt_logprobs" in given and given.get("stream"):
        raise RequestError("prompt_logprobs can't be streamed", param="prompt_logprobs")
    for field in ("logit_bias", "stop_token_ids"):
        _check_ids(given.get(field, ()), field, model)
    return given


def _known(body: dict[str, Any], table: Mapping[str, Check], prefix: str = "") -> dict[str, Any]:
    """The fields that are not null, each checked."""
    unknown = next((name for name in body if name not in table), None)
    if unknown is not None:
        name = f"{prefix}{unknown[:100]}"
        raise RequestError(f"unrecognized field {name}", param=name, code="unknown_parameter")
    return {name: table[name](value, f"{prefix}{name}") for name, value in body.items() if value is not None}


def _required(given: Mapping[str, Any], name: str, prefix: str = "") -> Any:
    if name not in given:
        path = f"{prefix}{name}"
        raise RequestError(f"{path} is required", param=path, code="missing_required_parameter")
    return given[name]


def _delivery(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "stream": given.get("stream", False),
        "include_usage": given.get("stream_options", False),
        "priority": given.get("priority", 0),
    }


def _check_ids(token_ids: Any, name: str, model: ModelFacts) -> None:
    """Token ids (or the keys of a bias) must be in the vocabulary."""
    beyond = next((i for i in token_ids if not 0 <= i < model.vocab_size), None)
    if beyond is not None:
        message = f"{name} holds token id {beyond}; the vocabulary has ids 0..{model.vocab_size - 1}"
        raise RequestError(message, param=name, code="invalid_token_id")


# ---- completions -----------------------------------------------------------------------------------------------------


def _prompts(value: Any, model: ModelFacts) -> tuple[Prompt, ...]:
    """A string, strings, token ids, or arrays of token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and type(value[0]) is int:
        return (_prompt_ids(value, model),)
    if not isinstance(value, list) or not value:
        raise RequestError("prompt must be a string, or a non-empty array of strings or token ids", param="prompt")
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(value)} prompts, at most {MAX_PROMPTS} are allowed", param="prompt")
    if not all(type(item) is type(value[0]) for item in value):
        raise RequestError("prompt mixes types; give strings only or arrays of token ids only", param="prompt")
    if isinstance(value[0], str):
        return tuple(value)
    return tuple(_prompt_ids(item, model) for item in value)


def _prompt_ids(value: Any, model: ModelFacts) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise RequestError("a prompt of token ids must be a non-empty array of integers", param="prompt")
    if len(value) >= model.max_model_len:
        message = (
            f"the prompt has {len(value)} tokens and the context holds {model.max_model_len}, "
            "of which at least one is generated; shorten the prompt"
        )
        raise RequestError(message, param="prompt", code="context_length_exceeded")
    if not all(type(item) is int for item in value):
        raise RequestError("a prompt of token ids must hold integers only", param="prompt", code="invalid_type")
    _check_ids(value, "prompt", model)
    return tuple(value)


def _check_best_of(given: Mapping[str, Any], n: int) -> None:
    if given.get("best_of", n) != n:
        raise RequestError("best_of other than n is not supported", param="best_of", code="unsupported_parameter")


def _check_num_choices(n: int, num_prompts: int) -> None:
    if n * num_prompts > MAX_CHOICES:
        message = f"{num_prompts} prompts with n={n} make {n * num_prompts} choices, at most {MAX_CHOICES} are allowed"
        raise RequestError(message, param="n")


# ---- chat ------------------------------------------------------------------------------------------------------------


def _top_logprobs(given: Mapping[str, Any]) -> int | None:
    top = given.get("top_logprobs", 0)
    if not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must lie in 0..{MAX_LOGPROBS}, not {top}", param="top_logprobs")
    if top and not given.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return int(top) if given.get("logprobs") else None


def _messages(values: list[Any], model: ModelFacts) -> tuple[dict[str, str], ...]:
    if not values:
        raise RequestError("messages must hold at least one message", param="messages")
    if len(values) > model.max_model_len:
        # Each takes a token at least; a hundred thousand would be rendered for a second only to be refused.
        message = f"{len(values)} messages are more than a context of {model.max_model_len} tokens can hold"
        raise RequestError(message, param="messages", code="context_length_exceeded")
    return tuple(_message(value, i) for i, value in enumerate(values))


def _message(value: Any, i: int) -> dict[str, str]:
    """One message in the template's shape. `developer` is the newer name of `system`."""
    where = f"messages[{i}]"
    known: dict[str, Check] = {
        "role": string,
        "content": _content,
        "name": string,
        "tool_calls": one_of([]),
        **dict.fromkeys(("refusal", "audio", "function_call", "tool_call_id"), refused),
    }
    given = _known(record(value, where), known, f"{where}.")
    role = given.get("role")
    if role not in ROLES:
        message = f"{where}.role must be one of {', '.join(ROLES)}, not {str(role)[:40]!r}"
        raise RequestError(message, param=f"{where}.role")
    named = {"name": given["name"]} if "name" in given else {}
    return {"role": ROLES[role], "content": _required(given, "content", f"{where}."), **named}


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
    given = _known(value, {"type": string, "text": string}, f"{name}.")
    return str(_required(given, "text", f"{name}."))
