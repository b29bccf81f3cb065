"""What shape an output must have: JSON, a regular expression, a grammar, or one of some texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedjax.core.errors import RequestError

MAX_GRAMMAR_BYTES = 64 * 2**10
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one kind is set. Names are vLLM's.

    `json` is a JSON schema (as text after construction), `regex` matches the whole output, `grammar` is Lark or GBNF,
    `json_object` asks for any JSON object. `whitespace_pattern` is what may stand between JSON's tokens, bounded unless
    given. `param` is what errors call the field. Raises RequestError; whether the grammar itself is sound shows when it
    is compiled.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False) or self._is_false_schema(kind)]
        if len(given) != 1:
            raise self._wrong(f"must set exactly one of {', '.join(KINDS)}")
        if self.json is not None:
            object.__setattr__(self, "json", self._schema_text())
        if self.choice is not None:
            object.__setattr__(self, "choice", self._choices())
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise self._wrong(f"{name} must be a string")
        if self.whitespace_pattern is not None and self.json is None and not self.json_object:
            raise self._wrong("whitespace_pattern is for JSON only")
        num_bytes = len(self.source.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise self._wrong(f"has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def source(self) -> str:
        """The text that says what is wanted."""
        value = getattr(self, self.kind)
        return json.dumps(value) if self.kind in ("choice", "json_object") else str(value)

    def refusal(self, reason: str) -> RequestError:
        """An error that blames this field."""
        return RequestError(f"{self.param}: {reason}", param=self.param, code="invalid_grammar")

    def _is_false_schema(self, kind: str) -> bool:
        return kind == "json" and self.json is False

    def _schema_text(self) -> str:
        if isinstance(self.json, str):
            return self.json
        try:
            return json.dumps(self.json)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._wrong(f"the schema is not JSON: {error}") from None

    def _choices(self) -> tuple[str, ...]:
        choices = self.choice
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise self._wrong("must be a list of texts, and not empty")
        wrong = next((i for i, choice in enumerate(choices) if not (isinstance(choice, str) and choice)), None)
        if wrong is not None:
            raise self._wrong(f"must hold texts that are not empty, not {choices[wrong]!r:.40} at index {wrong}")
        return tuple(choices)

    def _wrong(self, complaint: str) -> RequestError:
        return RequestError(f"{self.param} {complaint}", param=self.param)
