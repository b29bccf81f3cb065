"""What comes out of the engine: increments of sequences, and their sum in the shape of vLLM's RequestOutput."""

from typing import NamedTuple

import numpy as np

from pagedjax.core.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
from pagedjax.engine.submission import Submission
from pagedjax.engine.tokenizer import Tokenizer

TokenLogprobs = dict[int, Logprob]


class EngineError(Exception):
    """Our fault: the request was sound, but the engine could not finish it. Serving renders it as a 500."""


class Delta(NamedTuple):
    """What one sequence of a request gained in one step. (NamedTuple: two are made per row and step, one of them behind
    the socket, at a quarter of a frozen dataclass's cost.)

    `logprobs` has one entry a token, where asked for. `cumulative_logprob` is that of the whole sequence, where it is
    known without them (beams).
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


class Update(NamedTuple):
    """A delta on its way to whoever asked, with what is known of the prompt by the first one.

    `error` ends the whole request; `delta` is then None. `embedding` [hidden] is what was asked for in place of text.
    """

    request_id: str
    delta: Delta | None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: Exception | None = None
    embedding: np.ndarray | None = None


def token_logprobs(
    tokenizer: Tokenizer, token_ids: np.ndarray, logprobs: np.ndarray, rank: int, num_top: int
) -> TokenLogprobs:
    """One token's entry from the sampler's arrays [1 + alternatives]: the token itself first, then the likeliest."""
    entry = {int(token_ids[0]): Logprob(float(logprobs[0]), int(rank), tokenizer.token_text(int(token_ids[0])))}
    for place, token_id in enumerate(token_ids[1 : num_top + 1].tolist(), 1):
        if token_id not in entry:
            entry[token_id] = Logprob(float(logprobs[place]), place, tokenizer.token_text(token_id))
    return entry


def empty_output(submission: Submission) -> RequestOutput:
    """The result before the first delta."""
    return RequestOutput(
        request_id=submission.request_id,
        prompt=submission.prompt,
        prompt_token_ids=submission.prompt_token_ids,
        outputs=[
            CompletionOutput(index, logprobs=None if submission.params.logprobs is None else [])
            for index in range(submission.params.n)
        ],
    )


def add_update(output: RequestOutput, update: Update) -> None:
    """Fold one update into the result."""
    if update.delta is None:
        raise update.error or EngineError("the request ended without a result")
    output.num_cached_tokens = update.num_cached_tokens
    output.prompt_logprobs = update.prompt_logprobs
    add_delta(output.outputs[update.delta.index], update.delta)
    output.finished = all(c.finished for c in output.outputs)


def add_delta(completion: CompletionOutput, delta: Delta) -> None:
    """Fold one delta into what its sequence has given so far."""
    completion.text += delta.text
    completion.token_ids.extend(delta.token_ids)
    if delta.logprobs is not None and completion.logprobs is not None:
        completion.logprobs.extend(delta.logprobs)
        gained = sum(entry[token].logprob for token, entry in zip(delta.token_ids, delta.logprobs, strict=True))
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + gained
    if delta.cumulative_logprob is not None:
        completion.cumulative_logprob = delta.cumulative_logprob
    completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason


def best_of(candidates: list[CompletionOutput], params: SamplingParams) -> list[Delta]:
    """The `n` candidates with the highest log-probability per token (OpenAI's order), each as one delta; the best has
    index 0, and the earlier of equals goes first."""
    ranked = sorted(candidates, key=lambda c: -(c.cumulative_logprob or 0.0) / len(c.token_ids))
    return [
        as_delta(index, c, shows_logprobs=params.logprobs is not None) for index, c in enumerate(ranked[: params.n])
    ]


def as_delta(index: int, whole: CompletionOutput, *, shows_logprobs: bool) -> Delta:
    """A whole output at once."""
    logprobs = tuple(whole.logprobs or ()) if shows_logprobs else None
    return Delta(index, whole.text, tuple(whole.token_ids), logprobs, whole.finish_reason, whole.stop_reason)
