"""Token ids to text as they come, never to be retracted: whole characters only, and nothing that may be a stop string.

A token is a run of bytes (`Tokenizer.token_bytes`), so text comes from one incremental UTF-8 decoder, in constant time
a token, and equals `Tokenizer.decode` of all ids. Stop strings are followed character by character (Knuth, Morris and
Pratt, 1977), so what is found does not depend on where tokens end.
"""

import codecs
from collections.abc import Iterable
from copy import copy

from pagedjax.engine.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence. All pieces from `push` and `finish`, concatenated, are the whole text.

    The stop string that is complete first wins, the longest of several that end together; the text ends before it, or
    with it under `include_stop_str_in_output`. The text of the first `min_tokens` tokens is no part of a stop string.
    `stopped` is the stop string found, None before. Belongs to one thread at a time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stopped: str | None = None
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop)]
        self._firsts = {text[0] for text in stop}
        self._include_stop = include_stop_str_in_output
        self._num_unmatched_tokens = min_tokens
        self._held = ""

    def copy(self) -> "Detokenizer":
        """Another one, which goes on from here."""
        other = copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        other._matchers = [copy(matcher) for matcher in self._matchers]
        return other

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with `token_ids`; empty once `stopped`."""
        if not self._matchers:
            return self._text(token_ids)
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """The rest, at the end of the sequence: what was held back, and U+FFFD for a character left half."""
        if self.stopped is not None:
            return ""
        text = self._certain(self._decoder.decode(b"", True))
        rest, self._held = self._held, ""
        return text + rest

    def _push_one(self, token_id: int) -> str:
        if self.stopped is not None:
            return ""
        text = self._text((token_id,))
        if self._num_unmatched_tokens:
            self._num_unmatched_tokens -= 1
            return text
        return self._certain(text)

    def _text(self, token_ids: Iterable[int]) -> str:
        hidden, token_bytes = self._hidden, self._token_bytes
        return self._decoder.decode(b"".join([token_bytes(i) for i in token_ids if i not in hidden]))

    def _certain(self, text: str) -> str:
        if not self._held and self._firsts.isdisjoint(text):
            return text
        seen = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            found = [matcher.stop for matcher in self._matchers if matcher.step(char)]
            if found:
                self.stopped, self._held = max(found, key=len), ""
                return seen[: index if self._include_stop else index - len(self.stopped)]
        certain = len(seen) - max((matcher.num_matched for matcher in self._matchers), default=0)
        self._held = seen[certain:]
        return seen[:certain]


class _Matcher:
    """How much of one stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # Entry n: the longest proper prefix of stop[:n + 1] that also ends it.
        self._borders = [0] * len(stop)
        for n in range(1, len(stop)):
            self._borders[n] = self._extend(self._borders[n - 1], stop[n])

    def step(self, char: str) -> bool:
        """Move on by one character; True once the whole stop string is there, after which nothing may follow."""
        self.num_matched = self._extend(self.num_matched, char)
        return self.num_matched == len(self.stop)

    def _extend(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.stop[num_matched] == char)
