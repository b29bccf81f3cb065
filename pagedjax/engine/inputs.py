"""What `LLM` takes for prompts, conversations and parameters, brought into one shape each.

Any iterable serves as a list, and arrays of NumPy, JAX and others as lists of numbers. What is neither is refused with
a RequestError that shows it.
"""

from collections.abc import Iterable, Mapping
from numbers import Number
from operator import index
from typing import Any

from pagedjax.core.errors import RequestError

Prompt = str | Iterable[int] | Mapping[str, Any]
Messages = Iterable[Mapping[str, Any]]


def each_prompt(prompts: Prompt | Iterable[Prompt]) -> list[str | list[int]]:
    """A string, a dict and a list that begins with a number are one prompt; any other list holds several."""
    prompts = _plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts)]
    many = _items(prompts, _no_prompt)
    return [_prompt(many)] if many and isinstance(_plain(many[0]), Number) else [_prompt(prompt) for prompt in many]


def each_conversation(messages: Messages | Iterable[Messages]) -> list[list[Mapping[str, Any]]]:
    """Messages are one conversation, lists of messages several."""
    many = _items(messages, _no_conversation)
    return [many] if many and isinstance(many[0], Mapping) else [_items(each, _no_conversation) for each in many]


def one_each(name: str, value: Any, kind: type, count: int) -> list[Any]:
    """`value` for all of `count` prompts, or its entries, one each."""
    value = _plain(value)
    is_one = isinstance(value, str | Mapping) or not isinstance(value, Iterable)
    each = [value] * count if is_one else list(value)
    if len(each) != count:
        raise RequestError(f"{name} has {len(each)} entries for {count} prompts", param=name)
    if wrong := [entry for entry in each if not isinstance(entry, kind)]:
        found = type(wrong[0]).__name__
        raise RequestError(f"{name} is one {kind.__name__} for all prompts or one each, not {found}", param=name)
    return each


def _prompt(prompt: Any) -> str | list[int]:
    prompt = _plain(prompt)
    if isinstance(prompt, Mapping):
        fields = set(prompt) & {"prompt", "prompt_token_ids"}
        if len(fields) != 1 or len(prompt) != 1:
            raise RequestError("a prompt given as a dict has either prompt or prompt_token_ids", param="prompt")
        prompt = _plain(prompt[fields.pop()])
    if isinstance(prompt, str):
        return prompt
    try:
        return [_integer(_plain(token_id)) for token_id in _items(prompt, _no_prompt)]
    except TypeError:
        raise _no_prompt(prompt) from None


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def _items(value: Any, refusal: Any) -> list[Any]:
    # The items of bytes are integers too, but nobody means token ids by them.
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        raise refusal(value)
    return list(value)


def _no_prompt(value: Any) -> RequestError:
    return RequestError(f"a prompt is a string or a list of token ids, not {_shown(value)}", param="prompt")


def _no_conversation(value: Any) -> RequestError:
    message = f"a conversation is a list of messages with role and content, not {_shown(value)}"
    return RequestError(message, param="messages")


def _shown(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {repr(value)[:60]}"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, memoryview) else value
