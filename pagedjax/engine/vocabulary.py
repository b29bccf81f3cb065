"""What a checkpoint says of its vocabulary, and the bytes that each token stands for."""

import json
from typing import Any, NamedTuple

import tokenizers

from pagedjax.core.errors import ConfigError
from pagedjax.engine.chat_template import ChatTemplate

_SPACE = "▁"


class Vocabulary(NamedTuple):
    """The parts of a Tokenizer. `eos_token_ids` are all ids that end an answer."""

    backend: tokenizers.Tokenizer
    chat_template: ChatTemplate | None
    bos_token_id: int | None
    eos_token_ids: frozenset[int]


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
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
