"""From a request's body to what the engine queues. Touches no event loop, so that large bodies are read beside it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from pagedjax.core.errors import RequestError
from pagedjax.core.tenants import DEFAULT_TENANT
from serving.inputs import ModelFacts, Prompt
from serving.interfaces import Engine
from serving.schemas import ChatCall, CompletionCall, parse_chat, parse_completion

if TYPE_CHECKING:
    from pagedjax.engine.submission import Submission

Call = TypeVar("Call", CompletionCall, ChatCall)
Read = Callable[[Engine, bytes, str, str], tuple[Call, list["Submission"]]]


def read_completion(
    engine: Engine, body: bytes, response_id: str, tenant: str = DEFAULT_TENANT
) -> tuple[CompletionCall, list["Submission"]]:
    """The call and one submission a prompt. Raises RequestError naming the field."""
    call = parse_completion(from_json(body), _facts(engine))
    return call, _prepare(engine, [_encode(engine, prompt) for prompt in call.prompts], call, response_id, tenant)


def read_chat(
    engine: Engine, body: bytes, response_id: str, tenant: str = DEFAULT_TENANT
) -> tuple[ChatCall, list["Submission"]]:
    """The call and its one submission. Raises RequestError naming the field."""
    call = parse_chat(from_json(body), _facts(engine))
    # The template writes the special tokens itself.
    text = engine.tokenizer.apply_chat_template(list(call.messages), add_generation_prompt=True)
    token_ids = engine.tokenizer.encode(text, add_special_tokens=False, max_len=engine.max_model_len)
    if not token_ids:
        raise RequestError("the chat template made an empty prompt of these messages", param="messages")
    return call, _prepare(engine, [token_ids], call, response_id, tenant)


def from_json(body: bytes) -> Any:
    """Raises RequestError for what is no JSON: NaN, lone surrogates, over-deep nesting too."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None


def _facts(engine: Engine) -> ModelFacts:
    return ModelFacts(engine.model_name, engine.tokenizer.vocab_size, engine.max_model_len)


def _encode(engine: Engine, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    token_ids = engine.tokenizer.encode(prompt, max_len=engine.max_model_len)
    if not token_ids:
        raise RequestError("prompt is empty: it holds no token to continue from", param="prompt")
    return token_ids


def _prepare(
    engine: Engine, prompts: Sequence[list[int]], call: CompletionCall | ChatCall, response_id: str, tenant: str
) -> list["Submission"]:
    names = [response_id] if len(prompts) == 1 else [f"{response_id}-{i}" for i in range(len(prompts))]
    return [
        engine.prepare(
            prompt,
            call.params,
            request_id=name,
            priority=call.priority,
            tenant=tenant,
            cache_salt=call.cache_salt,
        )
        for prompt, name in zip(prompts, names)
    ]
