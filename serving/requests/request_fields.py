"""The fields of /v1/completions and /v1/chat/completions, and how each is checked.

Every field of OpenAI's schema is honoured or refused by name, and so is a field it does not have. `null` means absent.
The tables are the whole list. Fields that are checked and then have no effect are those that cannot change an output
here: who asks (`user`, `safety_identifier`, `metadata`), hints (`prompt_cache_key`), and values that name what the
server does anyway (`store: false`, `response_format: {"type": "text"}`, `tool_choice: "none"`, …).
"""

from typing import Any

from pagedjax.core.errors import RequestError
from pagedjax.core.request import MAX_PRIORITY, MIN_PRIORITY
from serving.requests import fields, shapes
from serving.requests.fields import Check, boolean, integer, known_fields, number, one_of, record, refused, string
from serving.tools.tools import read_choice, read_tools

MAX_SALT_CHARS = 256
MAX_TIMEOUT_S = 86_400


def _logit_bias(value: Any, name: str) -> dict[int, float]:
    bias = {}
    for key, amount in record(value, name).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise RequestError(f"{name} key {key!r} is not a token id", param=name)
        bias[int(key)] = number(amount, f"{name}[{key}]")
    return bias


def read_metadata(value: Any, name: str) -> dict[str, str]:
    pairs = record(value, name)
    if len(pairs) > 16 or any(len(key) > 64 for key in pairs):
        raise RequestError(f"{name} may have 16 keys of 64 characters", param=name)
    for key, item in pairs.items():
        if len(string(item, f"{name}.{key}")) > 512:
            raise RequestError(
                f"{name}.{key} has {len(item)} characters, at most 512 are allowed", param=f"{name}.{key}"
            )
    return pairs


def read_priority(value: Any, name: str) -> int:
    if not MIN_PRIORITY <= integer(value, name) <= MAX_PRIORITY:
        raise RequestError(f"{name} must lie in {MIN_PRIORITY}..{MAX_PRIORITY}, not {value}", param=name)
    return int(value)


def read_cache_salt(value: Any, name: str) -> str:
    if not 0 < len(string(value, name)) <= MAX_SALT_CHARS:
        raise RequestError(f"{name} must have 1 to {MAX_SALT_CHARS} characters", param=name)
    return str(value)


def read_timeout(value: Any, name: str) -> float:
    """Seconds that a request has for its answer."""
    if not 0 < number(value, name) <= MAX_TIMEOUT_S:
        raise RequestError(f"{name} must be seconds above 0, at most {MAX_TIMEOUT_S}, not {value}", param=name)
    return float(value)


def _at_least_one(value: Any, name: str) -> int:
    if integer(value, name) < 1:
        raise RequestError(f"{name} must be an integer at least 1, not {value}", param=name)
    return int(value)


def _stream_options(value: Any, name: str) -> dict[str, Any]:
    """Whether to send usage, and with vLLM's addition whether with every chunk. OpenAI's obfuscation of chunk sizes is
    not done here, so only false can be asked."""
    options = known_fields(record(value, name), _STREAM_OPTIONS, f"{name}.")
    if options.get("continuous_usage_stats") and not options.get("include_usage"):
        where = f"{name}.continuous_usage_stats"
        raise RequestError(f"{where} needs include_usage to be true", param=where)
    return options


_STREAM_OPTIONS: dict[str, Check] = {
    "include_usage": boolean,
    "continuous_usage_stats": boolean,
    "include_obfuscation": one_of(False),
}


SAMPLING: dict[str, Check] = {
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
    "length_penalty": number,
    "early_stopping": boolean,
}
DELIVERY: dict[str, Check] = {
    "model": string,
    "stream": boolean,
    "stream_options": _stream_options,
    "priority": read_priority,
    "preemptible": boolean,
    "use_beam_search": boolean,
    "cache_salt": read_cache_salt,
    "timeout": read_timeout,
    "user": string,
    **shapes.FIELDS,
}
COMPLETION: dict[str, Check] = {
    **SAMPLING,
    **DELIVERY,
    "prompt": lambda value, name: value,
    "echo": boolean,
    "logprobs": integer,
    "best_of": integer,
    "suffix": one_of(""),
}
CHAT: dict[str, Check] = {
    **SAMPLING,
    **DELIVERY,
    "messages": fields.array,
    "logprobs": boolean,
    "top_logprobs": integer,
    "max_tokens": _at_least_one,
    "max_completion_tokens": _at_least_one,
    "metadata": read_metadata,
    "safety_identifier": string,
    "prompt_cache_key": string,
    "parallel_tool_calls": boolean,
    "store": one_of(False),
    "service_tier": one_of("auto", "default"),
    "modalities": one_of(["text"]),
    "reasoning_effort": one_of("none"),
    "verbosity": one_of("medium"),
    "prompt_cache_retention": one_of("in_memory"),
    "tools": read_tools,
    "tool_choice": read_choice,
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
    "chat_template_kwargs": record,
    "functions": one_of([]),
    "function_call": one_of("none", "auto"),
    "audio": refused,
    "moderation": refused,
    "prediction": refused,
    "prompt_cache_options": refused,
    "web_search_options": refused,
}
