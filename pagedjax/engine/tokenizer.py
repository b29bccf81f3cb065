"""Text to token ids and back, built from a GGUF file's own metadata or from a Hugging Face directory.

Every tokenizer accepted here decodes bytewise: a token stands for fixed bytes, and text is their concatenation read as
UTF-8, each ill-formed part as one U+FFFD. That is what lets the detokenizer stream exactly (`detokenizer.py`).
A Tokenizer is immutable after construction and safe to share between threads.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.engine.vocabulary import Vocabulary, token_bytes
from pagedjax.engine.vocabulary_gguf import read_gguf
from pagedjax.engine.vocabulary_hf import read_hf


class Tokenizer:
    """One model's vocabulary with its rules.

    `vocab_size` counts ids, holes included. `eos_token_ids` are all ids that end an answer. Built by `from_gguf`,
    `from_hf` or `load_tokenizer`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend, self._chat_template, self.bos_token_id, self.eos_token_ids = vocabulary
        self._bytes = token_bytes(self._backend)
        self._max_token_bytes = max(map(len, self._bytes), default=0)
        self.vocab_size = len(self._bytes)
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        special = (self.bos_token_id, *self.eos_token_ids)
        outside = [i for i in special if i is not None and not 0 <= i < self.vocab_size]
        if outside:
            raise ConfigError(f"the tokenizer's special ids {outside} lie outside its vocabulary of {self.vocab_size}")

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process it goes as its parts."""
        return Tokenizer, (self._vocabulary,)

    @classmethod
    def from_gguf(cls, path: str | Path) -> "Tokenizer":
        """Build the tokenizer that the metadata of the GGUF file at `path` describes.

        Raises ConfigError, by name, for a vocabulary or a pre-tokenizer that is not known here.
        """
        return cls(read_gguf(Path(path)))

    @classmethod
    def from_hf(cls, directory: str | Path) -> "Tokenizer":
        """Read tokenizer.json and, where present, tokenizer_config.json, generation_config.json and the chat template.

        Raises ConfigError where tokenizer.json is missing or does not decode bytewise.
        """
        return cls(read_hf(Path(directory)))

    def encode(self, text: str, add_special_tokens: bool = True, *, max_len: int | None = None) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model wants around a text (often a BOS token).

        Control tokens spelt out in `text` become those tokens, as in vLLM and transformers. A text that a chat
        template has rendered already holds them: encode it with `add_special_tokens=False`. Bytes that the vocabulary
        lacks (in practice some control characters) vanish, as they do there.
        Raises RequestError for text that is not Unicode (lone surrogates), and at once for one larger than any
        `max_len` tokens, which would only be tokenised to be refused.
        """
        try:
            num_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate at character {error.start}: it is not Unicode", param="prompt"
            ) from error
        if max_len is not None and num_bytes > max_len * self._max_token_bytes:
            raise RequestError(
                f"This model's maximum context length is {max_len} tokens. However, your text has {num_bytes} bytes, "
                f"more than {max_len} tokens can hold.",
                param="prompt",
                code="context_length_exceeded",
            )
        # A batch, though of one: `encode` keeps the interpreter's lock, and would hold up every other thread.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary stand for nothing, bytes that are not UTF-8 for U+FFFD.

        A leading space is kept, since the text may continue another.
        """
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in hidden).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` stands for; none for an id outside the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """The token alone as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def check_fits(self, num_embeddings: int) -> None:
        """Raise ConfigError where the model has fewer embeddings than this vocabulary has ids."""
        if self.vocab_size > num_embeddings:
            raise ConfigError(
                f"the tokenizer has {self.vocab_size} ids and the model only {num_embeddings} embeddings: they belong "
                "to different models; give --model a checkpoint with its own tokenizer"
            )

    @property
    def chat_template_text(self) -> str:
        """The template's own source, to see what it knows; empty for a model without one."""
        return "" if self._chat_template is None else self._chat_template.text

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text for `messages`, rendered by the model's own template; `kwargs` reach the template.

        Encode it with `add_special_tokens=False`, or call `encode_chat`.
        Raises RequestError for messages that the template refuses, and for a model without a template.
        """
        if self._chat_template is None:
            raise RequestError("this model has no chat template; use completions with a prompt instead")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)

    def encode_chat(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of `messages` under the model's chat template; errors as in `apply_chat_template`."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the checkpoint at `path`: a GGUF file or a Hugging Face directory. Raises ConfigError."""
    return Tokenizer.from_hf(path) if Path(path).is_dir() else Tokenizer.from_gguf(path)
