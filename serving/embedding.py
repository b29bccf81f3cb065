"""/v1/embeddings: texts as vectors, pooled from the served model's last hidden states."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from pagedjax.core.errors import RequestError
from pagedjax.core.request import SamplingParams
from serving.answers.openai import Choice, Head
from serving.requests import fields, request_fields, schemas
from serving.requests.fields import Check, known_fields, record, required, string
from serving.requests.inputs import ModelFacts, Prompt, read_prompts

if TYPE_CHECKING:
    from serving.interfaces import Delta

Pooling = Literal["last", "mean"]
Encoding = Literal["float", "base64"]

FIELDS: dict[str, Check] = {
    "model": string,
    "input": lambda value, name: value,
    "encoding_format": string,
    "pooling": string,
    "priority": request_fields.read_priority,
    "preemptible": fields.boolean,
    "cache_salt": request_fields.read_cache_salt,
    "timeout": request_fields.read_timeout,
    "user": string,
    "dimensions": fields.refused,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall:
    """`prompts` become one vector each. The engine samples one token of each, which nobody sees."""

    prompts: tuple[Prompt, ...]
    pooling: Pooling = "last"
    encoding: Encoding = "float"
    priority: int = 0
    preemptible: bool = True
    cache_salt: str = ""
    timeout_s: float | None = None
    params: SamplingParams = SamplingParams(max_tokens=1, temperature=0.0)
    stream: bool = False
    include_usage: bool = False


def parse_embedding(body: Any, model: ModelFacts) -> EmbeddingCall:
    """Raises RequestError naming the field."""
    given = known_fields(record(body, fields.BODY), FIELDS, lenient=model.options.lenient)
    schemas.check_model(given, model)
    return EmbeddingCall(
        prompts=read_prompts(required(given, "input"), model, name="input"),
        pooling=cast(Pooling, _one_of(given, "pooling", "last", "mean")),
        encoding=cast(Encoding, _one_of(given, "encoding_format", "float", "base64")),
        priority=given.get("priority", 0),
        preemptible=given.get("preemptible", True),
        cache_salt=given.get("cache_salt", ""),
        timeout_s=given.get("timeout"),
    )


class EmbeddingRendering:
    """Vectors of length 1, as numbers or as little-endian float32 in base64. Never streamed."""

    done = b""

    def __init__(self, head: Head, call: EmbeddingCall) -> None:
        self._head, self._call = head, call

    def begin(self, choice: Choice) -> bytes:
        raise NotImplementedError("embeddings are not streamed")

    def chunk(self, choice: Choice, delta: "Delta") -> bytes:
        raise NotImplementedError("embeddings are not streamed")

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        raise NotImplementedError("embeddings are not streamed")

    def failure(self, error: Mapping[str, Any]) -> bytes:
        raise NotImplementedError("embeddings are not streamed")

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        entries = [{"object": "embedding", "index": one.index, "embedding": self._shown(one)} for one in choices]
        counts = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]}
        return {"object": "list", "data": entries, "model": self._head.model, "usage": counts}

    def _shown(self, choice: Choice) -> list[float] | str:
        vector = choice.stream.embedding
        if vector is None:
            raise RuntimeError("the engine gave no embedding")
        unit = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype("<f4")
        return base64.b64encode(unit.tobytes()).decode() if self._call.encoding == "base64" else unit.tolist()


def _one_of(given: dict[str, Any], name: str, default: str, *others: str) -> str:
    value = given.get(name, default)
    if value not in (default, *others):
        raise RequestError(f"{name} must be one of {', '.join((default, *others))}", param=name)
    return str(value)
