"""The vocabulary in a GGUF file's metadata, as a tokenizer of the `tokenizers` package.

Byte-level BPE only; what is not known here is refused by name.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pagedjax.core.errors import ConfigError
from pagedjax.engine.chat_template import ChatTemplate
from pagedjax.engine.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pagedjax.weights.gguf import GgufFile

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


def read_gguf(path: Path) -> Vocabulary:
    """What the metadata of the GGUF file at `path` says. Raises ConfigError."""
    # With JAX, which a process that only tokenises has no use for.
    from pagedjax.weights.gguf import open_gguf

    file = open_gguf(path)
    try:
        return _read(file)
    finally:
        file.close()


def _read(file: "GgufFile") -> Vocabulary:
    metadata = file.metadata
    tokens, kinds = _tokens(file)
    backend = _backend(file, tokens)
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
    return Vocabulary(backend, template, bos, frozenset(ends))


def _tokens(file: "GgufFile") -> tuple[list[str], list[int]]:
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


def _backend(file: "GgufFile", tokens: list[str]) -> tokenizers.Tokenizer:
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


def _pre_tokenizer(file: "GgufFile") -> pre_tokenizers.PreTokenizer:
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


def _frame(backend: tokenizers.Tokenizer, file: "GgufFile", bos: int | None, eos: int | None) -> None:
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
