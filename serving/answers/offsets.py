"""Where in a completion's text its tokens begin: OpenAI's `text_offset`, in characters.

A token's offset is that of its first new character, so it counts the characters that were complete before it. The
tokens that share a character share its offset, and so does a token that does not show with the one after it. Offsets
count in the text before a stop string is cut off.
"""

import codecs
from collections.abc import Iterable

from serving.interfaces import Tokenizer


class TextOffsets:
    """Offsets of one choice's tokens, the prompt's first where that is echoed."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def of_prompt(self, token_ids: Iterable[int], text: str, *, is_written: bool) -> list[int]:
        """Offsets in `text`, which is the prompt as it was written, or what its ids decode to."""
        written, found = text.encode("utf-8", "replace") if is_written else None, []
        num_bytes = 0
        for token_id in token_ids:
            shown = self._shown(token_id) if written is None else self._written(token_id, written, num_bytes)
            num_bytes += len(shown)
            found.append(min(self._num_chars, len(text)))
            self._num_chars += len(self._decoder.decode(shown))
        # Decoding starts anew behind a prompt; and a tokenizer may have changed what was written.
        self._decoder.reset()
        self._num_chars = len(text)
        return found

    def of_answer(self, token_ids: Iterable[int]) -> list[int]:
        """Offsets of the next tokens that were generated."""
        found = []
        for token_id in token_ids:
            found.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(self._shown(token_id)))
        return found

    def _shown(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)

    def _written(self, token_id: int, written: bytes, num_bytes: int) -> bytes:
        """A special token shows if it was spelt out, and not if the tokenizer put it there."""
        token_bytes = self._tokenizer.token_bytes(token_id)
        added = token_id in self._tokenizer.special_token_ids and not written.startswith(token_bytes, num_bytes)
        return b"" if added else token_bytes
