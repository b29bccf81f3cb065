"""Text to token ids and back, built from a GGUF file's own metadata or from a Hugging Face directory.

Every tokenizer accepted here decodes bytewise: a token stands for fixed bytes, and text is their concatenation read as
UTF-8, each ill-formed part as one U+FFFD. That is what lets the detokenizer stream exactly (`detokenizer.py`).
A Tokenizer is immutable after construction and safe to share between threads.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.engine.chat_template import ChatTemplate
from pagedjax.weights.gguf import GgufFile, open_gguf

# What `tokenizer.ggml.token_type` says of a token.
_CONTROL, _USER_DEFINED = 3, 4
# A GGUF names one end token; instruct models may also end a turn with one of these.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"})
_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Split patterns by `tokenizer.ggml.pre`, those of the models' own tokenizer.json files.
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_SINGLE_DIGITS = ("smollm", "starcoder")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_PRE_NAMES = (*_SINGLE_DIGITS, *_LLAMA3_NAMES, "gpt-2", "qwen2")
_SPACE = "▁"


class Tokenizer:
    """One model's vocabulary with its rules.

    `vocab_size` counts ids, holes included. `eos_token_ids` are all ids that end an answer. Built by `from_gguf`,
    `from_hf` or `load_tokenizer`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._bytes = _token_bytes(backend)
        self._max_token_bytes = max(map(len, self._bytes), default=0)
        self.vocab_size = len(self._bytes)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        outside = [i for i in (bos_token_id, *self.eos_token_ids) if i is not None and not 0 <= i < self.vocab_size]
        if outside:
            raise ConfigError(f"the tokenizer's special ids {outside} lie outside its vocabulary of {self.vocab_size}")

    @classmethod
    def from_gguf(cls, path: str | Path) -> "Tokenizer":
        """Build the tokenizer that the metadata of the GGUF file at `path` describes.

        Raises ConfigError, by name, for a vocabulary or a pre-tokenizer that is not known here.
        """
        file = open_gguf(Path(path))
        try:
            return _from_gguf(cls, file)
        finally:
            file.close()

    @classmethod
    def from_hf(cls, directory: str | Path) -> "Tokenizer":
        """Read tokenizer.json and, where present, tokenizer_config.json, generation_config.json and the chat template.

        Raises ConfigError where tokenizer.json is missing or does not decode bytewise.
        """
        return _from_hf(cls, Path(directory))

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


def _from_gguf(cls: type[Tokenizer], file: GgufFile) -> Tokenizer:
    metadata = file.metadata
    tokens, kinds = _gguf_vocabulary(file)
    backend = _gguf_backend(file, tokens)
    _add_tokens(backend, tokens, kinds)
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    _frame(backend, file, bos, eos)
    ends = {metadata[key] for key in _END_KEYS if key in metadata}
    ends |= {i for i, kind in enumerate(kinds) if kind == _CONTROL and tokens[i] in _END_OF_TURN}
    names = {"bos": bos, "eos": eos, "unk": metadata.get("tokenizer.ggml.unknown_token_id")}
    names["pad"] = metadata.get("tokenizer.ggml.padding_token_id")
    texts = {f"{name}_token": tokens[i] for name, i in names.items() if i is not None and 0 <= i < len(tokens)}
    source = metadata.get("tokenizer.chat_template")
    template = ChatTemplate(source, texts) if source else None
    return cls(backend, chat_template=template, bos_token_id=bos, eos_token_ids=ends)


def _gguf_vocabulary(file: GgufFile) -> tuple[list[str], list[int]]:
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        name = {"llama": "SentencePiece ('llama')", None: "missing"}.get(kind, repr(kind))
        raise ConfigError(
            f"{file.path}: its vocabulary is {name}; byte-level BPE ('gpt2') is read from GGUF files. Serve the "
            "model's Hugging Face directory instead (config.json, *.safetensors, tokenizer.json)"
        )
    tokens, kinds = file.metadata.get("tokenizer.ggml.tokens", []), file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ConfigError(f"{file.path} holds no vocabulary (tokenizer.ggml.tokens); convert the model again")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ConfigError(f"{file.path}: tokenizer.ggml.token_type must name the kind of each of {len(tokens)} tokens")
    return tokens, kinds


def _gguf_backend(file: GgufFile, tokens: list[str]) -> tokenizers.Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre")
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConfigError(f"{file.path}: {len(tokens) - len(vocabulary)} tokens of its vocabulary occur twice")
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3_NAMES)
    except Exception as error:  # `tokenizers` raises bare Exception for merges that name no token
        raise ConfigError(f"{file.path}: its merges do not fit its vocabulary ({error})") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(file)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(file: GgufFile) -> pre_tokenizers.PreTokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre")
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", False))
    words = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)
    if pre == "gpt-2":
        return words
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if pre in _LLAMA3_NAMES or pre == "qwen2":
        split = pre_tokenizers.Split(Regex(_QWEN2 if pre == "qwen2" else _LLAMA3), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)])
    raise ConfigError(
        f"{file.path}: its pre-tokenizer (tokenizer.ggml.pre) is {pre!r}; known are {', '.join(_PRE_NAMES)}. "
        "Serve the model's Hugging Face directory instead"
    )


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    def added(kind: int, special: bool) -> list[AddedToken]:
        return [AddedToken(tokens[i], special=special, normalized=False) for i, k in enumerate(kinds) if k == kind]

    backend.add_special_tokens(added(_CONTROL, True))
    backend.add_tokens(added(_USER_DEFINED, False))


def _frame(backend: tokenizers.Tokenizer, file: GgufFile, bos: int | None, eos: int | None) -> None:
    """Put the BOS and EOS tokens that the model wants around every text."""
    metadata = file.metadata
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES)
    before = [bos] if add_bos and bos is not None else []
    after = [eos] if metadata.get("tokenizer.ggml.add_eos_token", False) and eos is not None else []
    if not before and not after:
        return
    pairs = [(backend.id_to_token(i), i) for i in dict.fromkeys(before + after)]
    if any(token is None for token, _ in pairs):
        raise ConfigError(f"{file.path}: its BOS and EOS ids {before + after} lie outside its vocabulary")
    parts = [*(backend.id_to_token(i) for i in before), "$A", *(backend.id_to_token(i) for i in after)]
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=pairs)


def _from_hf(cls: type[Tokenizer], directory: Path) -> Tokenizer:
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
    texts = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    present = {name: text for name, text in texts.items() if text is not None}
    bos, eos = (backend.token_to_id(present[name]) if name in present else None for name in ("bos_token", "eos_token"))
    ends = {*_ids(eos), *_ids(generation.get("eos_token_id"))}
    template = _hf_template(directory, config)
    chat_template = ChatTemplate(template, present) if template else None
    return cls(backend, chat_template=chat_template, bos_token_id=bos, eos_token_ids=ends)


def _hf_template(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    source = directory / "chat_template.jinja"
    if source.is_file():
        return source.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return found


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def _ids(entry: int | list[int] | None) -> list[int]:
    return entry if isinstance(entry, list) else [] if entry is None else [entry]


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every id, holes empty, by the kind of the decoder. Raises ConfigError for one not bytewise."""
    read = _byte_level if _is_byte_level(backend) else _sentence_piece
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = read(token)
    for token_id, added in backend.get_added_tokens_decoder().items():
        table[token_id] = added.content.encode("utf-8")
    return table


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    parts = _decoder_parts(backend)
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return True
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    replaced = [
        (part.get("pattern", {}).get("String"), part.get("content")) for part in parts if part["type"] == "Replace"
    ]
    if kinds and set(kinds) <= known and all(pair == (_SPACE, " ") for pair in replaced):
        return False
    raise ConfigError(
        f"tokenizer.json decodes by {' + '.join(kinds) or 'nothing'}, which is not bytewise; byte-level BPE and "
        "SentencePiece tokenizers are supported"
    )


def _decoder_parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode("utf-8")
