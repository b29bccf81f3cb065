"""Chat templates: Jinja in a sandbox, with the settings and the extra names that transformers gives them.

`transformers.utils.chat_template_utils` is the definition, and the tests compare with it; it is not imported because it
takes a second. A template comes with the model and is not trusted; what it is given are plain JSON values.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from pagedjax.core.errors import RequestError

DEFAULT, TOOL_USE = "default", "tool_use"


class ChatTemplate:
    """One model's template, or several by name, compiled on first use. Safe to share between threads.

    `special_tokens` are the texts a template may name: bos_token, eos_token, unk_token, pad_token.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process it goes as its source, and is compiled there."""
        return ChatTemplate, (self._sources, self._special_tokens)

    @property
    def text(self) -> str:
        """The source of all templates together."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. Entries of a message that are None are left out, as transformers does.

        Raises RequestError with the template's own message for whatever goes wrong inside it.
        """
        template = self._template(tools)
        plain = [_without_none(message) for message in messages]
        values = {**self._special_tokens, **kwargs, "messages": plain, "tools": list(tools) if tools else None}
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return template.render(**values)
        # The template is a program that came with the model, run on a caller's values: its faults are the request's.
        except Exception as error:
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from error

    def _template(self, tools: Sequence[Any] | None) -> jinja2.Template:
        name = TOOL_USE if tools and TOOL_USE in self._compiled else DEFAULT
        template = self._compiled.get(name)
        if template is None:
            raise RequestError(f"the model has no chat template named {name!r}; it has {', '.join(self._sources)}")
        if isinstance(template, jinja2.TemplateError):
            raise RequestError(f"the model's chat template does not compile: {template}") from template
        return template

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template | jinja2.TemplateError]:
        return {name: _compile(source) for name, source in self._sources.items()}


def _compile(source: str) -> jinja2.Template | jinja2.TemplateError:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        return error


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` without the class itself, so that a template cannot walk from it into the interpreter."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` that stores no name with a leading underscore, for the same reason."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_public(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"a message must be an object with a role, not {type(message).__name__}", param="messages")
    return {key: value for key, value in message.items() if value is not None}
