"""From a request's body to what the engine queues. Touches no event loop, so that large bodies are read beside it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from pagedjax.core.errors import RequestError
from pagedjax.core.tenants import DEFAULT_TENANT
from serving import tools
from serving.embedding import EmbeddingCall, parse_embedding
from serving.inputs import ModelFacts, Prompt
from serving.interfaces import Engine
from serving.options import ApiOptions
from serving.responses import ResponseCall, parse_response
from serving.schemas import ChatCall, CompletionCall, parse_chat, parse_completion

if TYPE_CHECKING:
    from pagedjax.engine.submission import Submission

Call = TypeVar("Call", CompletionCall, ChatCall, EmbeddingCall, ResponseCall)
Read = Callable[[Engine, bytes, str, str, ApiOptions], tuple[Call, list["Submission"]]]


def read_completion(
    engine: Engine,
    body: bytes,
    response_id: str,
    tenant: str = DEFAULT_TENANT,
    options: ApiOptions = ApiOptions(),  # noqa: B008
) -> tuple[CompletionCall, list["Submission"]]:
    """The call and one submission a prompt. Raises RequestError naming the field."""
    call = parse_completion(from_json(body), facts(engine, options))
    return call, _prepare(engine, [_encode(engine, prompt) for prompt in call.prompts], call, response_id, tenant)


def read_chat(
    engine: Engine,
    body: bytes,
    response_id: str,
    tenant: str = DEFAULT_TENANT,
    options: ApiOptions = ApiOptions(),  # noqa: B008
) -> tuple[ChatCall, list["Submission"]]:
    """The call and its one submission. Raises RequestError naming the field."""
    call = parse_chat(from_json(body), facts(engine, options))
    if call.tools and tools.tags_are_hidden(engine.tokenizer):
        call = replace(call, params=replace(call.params, skip_special_tokens=False))
    return call, _prepare(engine, [encode_chat(engine, call)], call, response_id, tenant)


def read_embedding(
    engine: Engine,
    body: bytes,
    response_id: str,
    tenant: str = DEFAULT_TENANT,
    options: ApiOptions = ApiOptions(),  # noqa: B008
) -> tuple[EmbeddingCall, list["Submission"]]:
    """The call and one submission a text. Raises RequestError naming the field."""
    call = parse_embedding(from_json(body), facts(engine, options))
    prompts = [_encode(engine, prompt, "input") for prompt in call.prompts]
    return call, _prepare(engine, prompts, call, response_id, tenant)


def read_response(
    engine: Engine,
    body: bytes,
    response_id: str,
    tenant: str = DEFAULT_TENANT,
    options: ApiOptions = ApiOptions(),  # noqa: B008
) -> tuple[ResponseCall, list["Submission"]]:
    """The call and its one submission. Raises RequestError naming the field."""
    call = parse_response(from_json(body), facts(engine, options))
    return call, _prepare(engine, [encode_chat(engine, call.chat)], call.chat, response_id, tenant)


def encode_chat(engine: Engine, call: ChatCall) -> list[int]:
    """The prompt that the model's template makes of a chat. Raises RequestError."""
    tokenizer = engine.tokenizer
    messages, shown_tools = tools.for_template(call.messages, call.tools, tokenizer.chat_template_text)
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
