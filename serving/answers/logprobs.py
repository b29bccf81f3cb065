"""Log-probabilities in OpenAI's shapes: the four lists of completions, the entries of chats, vLLM's of prompts."""

from collections.abc import Iterable, Sequence
from typing import Any

from pagedjax.core.request import Logprob
from serving.interfaces import Stream, Tokenizer, TokenLogprobs

# JSON has no -inf, and clients take exp() of what they get.
MIN_LOGPROB = -9999.0

Tokens = Iterable[tuple[int, TokenLogprobs | None]]


def completion_logprobs(tokens: Tokens, top: int, tokenizer: Tokenizer, offsets: Sequence[int]) -> dict[str, Any]:
    """OpenAI's four parallel lists.

    The first token of a prompt has no logprob. `top_logprobs` holds the `top` likeliest and the token itself; where
    two candidates read the same, the likelier one stays.
    """
    body: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": list(offsets)}
    for token_id, found in tokens:
        text = tokenizer.token_text(token_id) if found is None else found[token_id].decoded_token
        body["tokens"].append(text)
        body["token_logprobs"].append(None if found is None else finite(found[token_id].logprob))
        body["top_logprobs"].append(None if found is None else _top_by_text(token_id, found, top))
    return body


def chat_logprob(token_id: int, found: TokenLogprobs, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """One token of a chat answer with its `top` likeliest candidates."""

    def shown(candidate_id: int, candidate: Logprob) -> dict[str, Any]:
        token_bytes = list(tokenizer.token_bytes(candidate_id))
        return {"token": candidate.decoded_token, "logprob": finite(candidate.logprob), "bytes": token_bytes}

    likeliest = [shown(i, candidate) for i, candidate in _by_rank(found) if candidate.rank <= top][:top]
    return shown(token_id, found[token_id]) | {"top_logprobs": likeliest}


def prompt_logprobs(stream: Stream, top: int) -> list[dict[str, Any] | None]:
    """vLLM's field of that name: per prompt token, token id -> logprob, rank and text."""
    return [None if found is None else _by_id(i, found, top) for i, found in prompt_tokens(stream)]


def finite(logprob: float) -> float:
    """-inf and NaN become MIN_LOGPROB."""
    return max(MIN_LOGPROB, logprob)


def prompt_tokens(stream: Stream) -> Iterable[tuple[int, TokenLogprobs | None]]:
    return zip(stream.prompt_token_ids, stream.prompt_logprobs or ())


def _by_rank(found: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(found.items(), key=lambda item: item[1].rank)


def _kept(token_id: int, found: TokenLogprobs, top: int) -> list[tuple[int, Logprob]]:
    return [(i, shown) for i, shown in _by_rank(found) if shown.rank <= top or i == token_id]


def _by_id(token_id: int, found: TokenLogprobs, top: int) -> dict[str, Any]:
    return {str(i): one._asdict() | {"logprob": finite(one.logprob)} for i, one in _kept(token_id, found, top)}


def _top_by_text(token_id: int, found: TokenLogprobs, top: int) -> dict[str, float]:
    shown: dict[str, float] = {}
    for _, candidate in _kept(token_id, found, top):
        shown.setdefault(candidate.decoded_token, finite(candidate.logprob))
    return shown
