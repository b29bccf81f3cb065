"""From a request's body to what the engine queues. Touches no event loop, so that large bodies are read beside it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from pagedjax.core.errors import RequestError
from pagedjax.core.tenants import DEFAULT_TENANT
from serving.embedding import EmbeddingCall
from serving.interfaces import Engine
from serving.options import ApiOptions
from serving.requests.inputs import ModelFacts, Prompt
from serving.requests.response_call import ResponseCall
from serving.requests.schemas import ChatCall, CompletionCall
from serving.tools import tool_prompt

if TYPE_CHECKING:
    from pagedjax.engine.submission import Submission

AnyCall = CompletionCall | ChatCall | EmbeddingCall | ResponseCall
Call = TypeVar("Call", CompletionCall, ChatCall, EmbeddingCall, ResponseCall)


def read(
    engine: Engine,
    body: bytes,
    parse: Callable[[Any, ModelFacts], Call],
    response_id: str,
    tenant: str = DEFAULT_TENANT,
    options: ApiOptions = ApiOptions(),  # noqa: B008
) -> tuple[Call, list["Submission"]]:
    """The call that `parse` finds in a body, and one submission a prompt. Raises RequestError naming the field."""
    call = _showing_tags(engine, parse(from_json(body), facts(engine, options)))
    return call, _prepare(engine, _token_ids(engine, call), _generating(call), response_id, tenant)


def _showing_tags(engine: Engine, call: Call) -> Call:
    """The call, with the tags around tool calls in its text where these are special tokens."""
    if isinstance(call, ResponseCall):
        return call._replace(chat=_showing_tags(engine, call.chat))
    if isinstance(call, ChatCall) and call.tools and tool_prompt.tags_are_hidden(engine.tokenizer):
        return replace(call, params=replace(call.params, skip_special_tokens=False))
    return call


def encode_chat(engine: Engine, call: ChatCall) -> list[int]:
    """The prompt that the model's template makes of a chat. Raises RequestError."""
    tokenizer = engine.tokenizer
    messages, shown_tools = tool_prompt.for_template(call.messages, call.tools, tokenizer.chat_template_text)
    extra = dict(call.template_kwargs) | ({"tools": shown_tools} if shown_tools else {})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=call.add_generation_prompt, **extra)
    if call.continue_final_message:
        text = _up_to(text, messages[-1]["content"].strip())
    # The template writes the special tokens itself.
    token_ids = tokenizer.encode(text, add_special_tokens=False, max_len=engine.max_model_len)
    if not token_ids:
        raise RequestError("the chat template made an empty prompt of these messages", param="messages")
    return token_ids


def _up_to(text: str, final: str) -> str:
    """The text up to the end of the final message, without what the template writes behind it."""
    start = text.rfind(final)
    if start < 0:
        message = "the chat template changes the final message, so it can't be continued"
        raise RequestError(message, param="continue_final_message")
    return text[: start + len(final)]


def from_json(body: bytes) -> Any:
    """Raises RequestError for what is no JSON: NaN, lone surrogates, over-deep nesting too."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None


def facts(engine: Engine, options: ApiOptions) -> ModelFacts:
    return ModelFacts(engine.model_name, engine.tokenizer.vocab_size, engine.max_model_len, options)


def _token_ids(engine: Engine, call: AnyCall) -> list[list[int]]:
    """The prompts of a call."""
    match call:
        case CompletionCall():
            return [_encode(engine, prompt) for prompt in call.prompts]
        case EmbeddingCall():
            return [_encode(engine, prompt, "input") for prompt in call.prompts]
        case ChatCall():
            return [encode_chat(engine, call)]
        case ResponseCall():
            return [encode_chat(engine, call.chat)]


def _generating(call: AnyCall) -> CompletionCall | ChatCall | EmbeddingCall:
    """What the engine is to do for a call."""
    return call.chat if isinstance(call, ResponseCall) else call


def _encode(engine: Engine, prompt: Prompt, name: str = "prompt") -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    token_ids = engine.tokenizer.encode(prompt, max_len=engine.max_model_len)
    if not token_ids:
        raise RequestError(f"{name} is empty: it holds no token to continue from", param=name)
    return token_ids


def _prepare(
    engine: Engine,
    prompts: Sequence[list[int]],
    call: CompletionCall | ChatCall | EmbeddingCall,
    response_id: str,
    tenant: str,
) -> list["Submission"]:
    names = [response_id] if len(prompts) == 1 else [f"{response_id}-{i}" for i in range(len(prompts))]
    return [
        engine.prepare(
            prompt,
            call.params,
            request_id=name,
            priority=call.priority,
            tenant=tenant,
            preemptible=call.preemptible,
            cache_salt=call.cache_salt,
            pooling=call.pooling if isinstance(call, EmbeddingCall) else None,
        )
        for prompt, name in zip(prompts, names)
    ]
