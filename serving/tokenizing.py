"""Text to token ids and back, as vLLM's /tokenize and /detokenize."""

from typing import Any

from pagedjax.core.errors import RequestError
from serving.interfaces import Engine
from serving.options import ApiOptions
from serving.requests import fields
from serving.requests.fields import Check, boolean, known_fields, record, required, string
from serving.requests.inputs import check_ids
from serving.requests.reading import encode_chat, facts, from_json
from serving.requests.schemas import parse_chat

MAX_TOKENS = 1_000_000

TEXT: dict[str, Check] = {
    "model": string,
    "prompt": string,
    "add_special_tokens": boolean,
    "return_token_strs": boolean,
}
FIELDS: dict[str, Check] = {**TEXT, "messages": fields.array, "tools": fields.array}
_CHAT_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
IDS: dict[str, Check] = {"model": string, "tokens": fields.integers}


def tokenize(engine: Engine, body: bytes, options: ApiOptions) -> dict[str, Any]:
    """A prompt's tokens, or those of a chat under the model's template. Raises RequestError."""
    given, model = record(from_json(body), fields.BODY), facts(engine, options)
    if "messages" in given:
        shown = {name: value for name, value in given.items() if name != "return_token_strs"}
        unknown = next((name for name in shown if name not in (*_CHAT_FIELDS, "model")), None)
        if unknown is not None and not options.lenient:
            raise RequestError(f"unrecognized field {unknown[:100]}", param=unknown[:100], code="unknown_parameter")
        token_ids = encode_chat(engine, parse_chat({"model": model.name, **shown}, model))
        wants_texts = fields.boolean(given.get("return_token_strs") or False, "return_token_strs")
    else:
        checked = known_fields(given, TEXT, lenient=options.lenient)
        _check_model(checked, engine)
        text, special = required(checked, "prompt"), checked.get("add_special_tokens", True)
        token_ids = engine.tokenizer.encode(text, special, max_len=MAX_TOKENS)
        wants_texts = checked.get("return_token_strs", False)
    texts = [engine.tokenizer.token_text(i) for i in token_ids] if wants_texts else None
    return {
        "count": len(token_ids),
        "max_model_len": engine.max_model_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


def detokenize(engine: Engine, body: bytes, options: ApiOptions) -> dict[str, Any]:
    """The text of token ids, special ones shown. Raises RequestError."""
    given = known_fields(record(from_json(body), fields.BODY), IDS, lenient=options.lenient)
    _check_model(given, engine)
    token_ids = required(given, "tokens")
    check_ids(token_ids, "tokens", facts(engine, options))
    return {"prompt": engine.tokenizer.decode(token_ids, skip_special_tokens=False)}


def _check_model(given: dict[str, Any], engine: Engine) -> None:
    if given.get("model", engine.model_name) != engine.model_name:
        message = f"the model {given['model'][:100]!r} does not exist; this server has {engine.model_name!r}"
        raise RequestError(message, param="model", code="model_not_found")
