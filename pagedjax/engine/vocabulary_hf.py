"""The vocabulary in a Hugging Face directory: tokenizer.json, and the special tokens and template beside it."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from pagedjax.core.errors import ConfigError
from pagedjax.engine.chat_template import ChatTemplate
from pagedjax.engine.vocabulary import Vocabulary


def read_hf(directory: Path) -> Vocabulary:
    """What tokenizer.json and the files beside it say. Raises ConfigError."""
    source = directory / "tokenizer.json"
    if not source.is_file():
        raise ConfigError(
            f"{directory} has no tokenizer.json; save it there with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(source))
    except Exception as error:  # `tokenizers` raises bare Exception for every fault of the file
        raise ConfigError(f"cannot read {source}: {error}") from error
    # A prompt is taken whole or refused by its length; the file's own cutting and padding would change it in silence.
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(directory / "tokenizer_config.json")
    generation = _read_json(directory / "config.json") | _read_json(directory / "generation_config.json")
    texts = {name: _token_text(config, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    present = {name: text for name, text in texts.items() if text is not None}
    bos, eos = (backend.token_to_id(present[name]) if name in present else None for name in ("bos_token", "eos_token"))
    ends = frozenset([*_ids(eos), *_ids(generation.get("eos_token_id"))])
    template = _template(directory, config)
    chat_template = ChatTemplate(template, present) if template else None
    return Vocabulary(backend, chat_template, bos, ends)


def _template(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    source = directory / "chat_template.jinja"
    if source.exists():
        return _read_text(source)
    template = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    named = template if isinstance(template, list) else []
    try:
        found = {entry["name"]: entry["template"] for entry in named} if named else template
    except (KeyError, TypeError):
        found = named
    texts = [part for pair in found.items() for part in pair] if isinstance(found, dict) else [found or ""]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{directory}: chat_template must be a text, or a list of objects with a name and a template")
    return found or None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error


def _token_text(config: dict[str, Any], name: str) -> str | None:
    entry = config.get(name)
    text = entry.get("content") if isinstance(entry, dict) else entry
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"tokenizer_config.json: {name} must be a text, not {text!r}")
    return text


def _ids(entry: Any) -> list[int]:
    ids = entry if isinstance(entry, list) else [] if entry is None else [entry]
    if not all(type(token_id) is int for token_id in ids):
        raise ConfigError(f"eos_token_id must be an integer or a list of integers, not {entry!r}")
    return ids
