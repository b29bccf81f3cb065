"""Structured output: grammars compiled once, and each sequence's place in its own. The work is llguidance's.

A grammar says after every token which tokens may follow: a mask of one bit a token, which the sampler applies. Masks
take some microseconds each and are computed while the step's forward pass runs. Compiling and masks are bounded by what
they may compute, so a hostile grammar costs milliseconds, and its request. Should that bound miss something, compiling
has a time limit too.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from pagedjax.core.errors import RequestError
from pagedjax.core.structure import StructuredOutputsParams
from pagedjax.engine.tokenizer import Tokenizer

# A space, or a new line with its indentation: a model that only ever writes white space gets no further.
WHITESPACE = "( |\\n {0,32})?"
MAX_CACHED, MAX_CACHED_BYTES = 256, 4 * 2**20
# About 10 ms for a mask at the worst, 50 ms for compiling, 20 MB for a sequence.
_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_MAX_MESSAGE_CHARS = 300
COMPILE_TIMEOUT_S = 10.0
# Threads that still compile what nobody waits for any more: they cannot be stopped, so there must not be many.
MAX_LATE_COMPILES = 4

T = TypeVar("T")


class Forced(NamedTuple):
    """The token that must come next, and into how many the text that must come was split to know it: it and those
    behind it. Those may be split otherwise once it is there."""

    token_id: int
    num_split: int


class GrammarState:
    """One sequence's place in its grammar. Made by `Grammars.compile`, copied for each sequence."""

    def __init__(self, matcher: llguidance.LLMatcher, params: StructuredOutputsParams) -> None:
        self._matcher, self._params = matcher, params

    def copy(self) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy(), self._params)

    def accept(self, token_id: int) -> bool:
        """Go on by a token that the mask allowed; says whether nothing may follow. Raises RequestError if it cannot."""
        self._matcher.consume_token(token_id)
        self._check()
        return bool(self._matcher.is_stopped())

    def forced(self) -> Forced | None:
        """The only token that may come next, if there is but one. Raises RequestError.

        llguidance forces tokens only where it tokenises like the model, and masks all others then: this one is what
        would be sampled. It splits the text for a mask too, but once for both.
        """
        token_ids = self._matcher.compute_ff_tokens()
        self._check()
        return Forced(token_ids[0], len(token_ids)) if token_ids else None

    def fill(self, mask: np.ndarray) -> None:
        """The tokens that may follow as bits of int32 [1, ceil(vocab / 32)], lowest first. Raises RequestError."""
        fill_next_token_bitmask(self._matcher, mask)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._params.refusal(f"the output cannot go on: {_short(self._matcher.get_error())}")


class Grammars:
    """Compiles grammars for one vocabulary, and keeps those that were used last. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._cached: OrderedDict[tuple[str, str, str | None], GrammarState] = OrderedDict()
        self._num_cached_bytes = 0
        self._num_late = 0

    @property
    def num_words(self) -> int:
        """Words of 32 bits in a mask."""
        num_tokens = self._tokenizer.vocab_size + (not self._tokenizer.eos_token_ids)
        return -(-num_tokens // 32)

    def compile(self, params: StructuredOutputsParams) -> GrammarState:
        """The grammar's beginning, to be copied for each sequence. Raises RequestError for one that is unsound, too
        large, or that no output can fulfil."""
        key = params.kind, params.source, params.whitespace_pattern
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer)
            if key in self._cached:
                self._cached.move_to_end(key)
                return GrammarState(self._cached[key]._matcher.deep_copy(), params)
        matcher = self._in_time(params, lambda: _matcher(self._vocabulary, params))
        state = GrammarState(matcher, params)
        self._keep(key, state)
        return GrammarState(matcher.deep_copy(), params)

    def _in_time(self, params: StructuredOutputsParams, work: Callable[[], T]) -> T:
        """What `work` gives on a thread of its own. Raises RequestError when it takes too long; it then goes on in
        vain, and where several do so already nothing new is begun."""
        if self._num_late >= MAX_LATE_COMPILES:
            raise params.refusal("earlier ones are still being compiled; try again later")
        found: Future[T] = Future()
        threading.Thread(target=_settle, args=(found, work), name="grammar", daemon=True).start()
        try:
            return found.result(COMPILE_TIMEOUT_S)
        except TimeoutError:
            with self._lock:
                self._num_late += 1
            found.add_done_callback(self._late_one_ended)
            raise params.refusal(f"compiling it takes more than {COMPILE_TIMEOUT_S:g} s") from None

    def _late_one_ended(self, _found: "Future[Any]") -> None:
        with self._lock:
            self._num_late -= 1

    def _keep(self, key: tuple[str, str, str | None], state: GrammarState) -> None:
        with self._lock:
            if key not in self._cached:
                self._cached[key] = state
                self._num_cached_bytes += len(key[1])
            while len(self._cached) > MAX_CACHED or self._num_cached_bytes > MAX_CACHED_BYTES:
                oldest, _ = self._cached.popitem(last=False)
                self._num_cached_bytes -= len(oldest[1])


def _matcher(vocabulary: Any, params: StructuredOutputsParams) -> llguidance.LLMatcher:
    """Raises RequestError. The interpreter's lock is free while it compiles."""
    limits = llguidance.LLParserLimits(**_LIMITS)
    matcher = llguidance.LLMatcher(vocabulary, _source(params), log_level=0, limits=limits)
    _check_sound(matcher, params)
    return matcher


def _settle(found: "Future[T]", work: Callable[[], T]) -> None:
    try:
        found.set_result(work())
    except BaseException as error:
        found.set_exception(error)


def _source(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own form."""
    matcher, source = llguidance.LLMatcher, params.source
    try:
        match params.kind:
            case "json" | "json_object":
                whitespace = WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
                schema = source if params.kind == "json" else '{"type": "object"}'
                return str(matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": whitespace}))
            case "regex":
                return str(matcher.grammar_from_regex(source))
            case "choice":
                return str(llguidance.grammar_from("choice", source))
            case _:
                return str(llguidance.grammar_from("grammar", source))
    except (ValueError, RecursionError) as error:
        raise params.refusal(_short(str(error))) from None


def _check_sound(matcher: llguidance.LLMatcher, params: StructuredOutputsParams) -> None:
    """Raise RequestError for a grammar with a fault; some show with the first mask only."""
    if matcher.is_error():
        raise params.refusal(_short(matcher.get_error()))
    first = matcher.deep_copy()
    mask = np.frombuffer(first.compute_bitmask(), np.uint8)
    if first.is_error() or first.is_stopped() or not mask.any():
        raise params.refusal("no output can fulfil it")


def _short(message: str) -> str:
    """What llguidance's message says first, and the error within it; the rest quotes the grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip().strip("^")]
    errors = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([*lines[:1], *errors])[:_MAX_MESSAGE_CHARS]


def _vocabulary(tokenizer: Tokenizer) -> Any:
    words = _Words(tokenizer)
    ends = sorted(tokenizer.eos_token_ids) or [words.eos_token_id]
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), eos_token=ends)


class _Words:
    """The vocabulary as llguidance wants it. A text that a grammar spells out is tokenised as the model would do it,
    but never into special tokens, which have no text in the output."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self.eos_token_id = min(tokenizer.eos_token_ids, default=tokenizer.vocab_size)
        if self.eos_token_id == tokenizer.vocab_size:
            # It wants a token that ends an output; this one the model cannot sample.
            self.tokens.append(b"<end>")
            self.special_token_ids.append(self.eos_token_id)
        self.bos_token_id = getattr(tokenizer, "bos_token_id", None)
        self._ids = {word: i for i, word in enumerate(self.tokens) if word and i not in self.special_token_ids}
        self._max_len = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        try:
            ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        except (RequestError, ValueError):
            return self._longest_first(data)
        is_plain = self._tokenizer.special_token_ids.isdisjoint(ids)
        return ids if is_plain and self._bytes(ids) == data else self._longest_first(data)

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.tokens[i] for i in ids])

    def _longest_first(self, data: bytes) -> list[int]:
        found, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._max_len), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break  # the vocabulary lacks a byte
            found.append(self._ids[data[start:end]])
            start = end
        return found
