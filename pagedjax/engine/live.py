"""What the engine remembers of sequences that have not finished, beside their tokens."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pagedjax.core.prefix import hash_block
from pagedjax.core.request import CompletionOutput, FinishReason, SamplingParams
from pagedjax.engine.detokenizer import Detokenizer
from pagedjax.engine.grammar import Forced, GrammarState
from pagedjax.engine.outputs import TokenLogprobs
from pagedjax.engine.submission import Submission
from pagedjax.runtime.sampler import needs_adjusting
from pagedjax.runtime.tokens import SequenceTokens

if TYPE_CHECKING:
    from pagedjax.engine.beams import Beams


@dataclass(slots=True)
class Group:
    """A request: its sequences. `prompt_logprobs` begins with None, for the token that nothing precedes. `candidates`
    are its samples so far, where only the best are to come out, `beams` its beams, where it has some."""

    submission: Submission
    arrival_us: int
    members: "dict[int, Live]" = field(default_factory=dict)
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    candidates: list[CompletionOutput] | None = None
    beams: "Beams | None" = None
    embedding: np.ndarray | None = None

    @property
    def has_left_line(self) -> bool:
        """Whether one of its sequences has had a step, or all have gone."""
        return self.num_cached_tokens is not None or not self.members


@dataclass(slots=True)
class Live:
    """One sequence. `last_hash` names its last full block; None if its blocks have no names. It has `started` with its
    first row, and `is_running` unless it is in line, for the first time or again. `grammar` is where its output is in
    the structure that it must have, if any; `fault` is why it cannot go on, until its next row is done. `pooled` sums
    the hidden states of the first `num_pooled` tokens, where they are wanted."""

    sequence_id: int
    index: int
    group: Group
    params: SamplingParams
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    last_hash: bytes | None
    grammar: GrammarState | None = None
    num_sampled: int = 0
    last_token_us: int = 0
    started: bool = False
    is_running: bool = False
    ended: bool = False
    fault: Exception | None = None
    pooled: np.ndarray | float = 0.0
    num_pooled: int = 0

    @property
    def request_id(self) -> str:
        return self.group.submission.request_id


def push(live: Live, token_id: int) -> tuple[str, FinishReason | None, int | str | None]:
    """Count a new token, sampled or forced: the text that is now certain, why the sequence ends there, and what did it.

    Raises RequestError when its grammar cannot go on."""
    params, finish = live.params, None
    reason: int | str | None = None
    live.num_sampled += 1
    is_stop = token_id in live.stop_ids and live.num_sampled > params.min_tokens
    text = "" if is_stop and not params.include_stop_str_in_output else live.detokenizer.push((token_id,))
    if is_stop:
        finish = FinishReason.STOP
        reason = token_id if token_id in (params.stop_token_ids or ()) else None
    elif live.detokenizer.stopped is not None:
        finish, reason = FinishReason.STOP, live.detokenizer.stopped
    elif live.num_sampled == params.max_tokens:
        finish = FinishReason.LENGTH
    if finish is not FinishReason.STOP and live.grammar is not None and live.grammar.accept(token_id):
        finish = FinishReason.STOP
    if finish is not None:
        text += live.detokenizer.finish()
    return text, finish, reason


def forced_token(live: Live) -> Forced | None:
    """What a sequence's grammar leaves no choice but to come next (jump-forward); to be asked anew once it is pushed.

    None where it must be sampled all the same: its log-probability is wanted, or the device changes logits by what it
    has sampled or by token (penalties, min_tokens, logit_bias). Raises RequestError when the grammar cannot go on."""
    if live.grammar is None or live.params.logprobs is not None or needs_adjusting(live.params):
        return None
    return live.grammar.forced()


def new_hash(live: Live, tokens: SequenceTokens, block_size: int) -> tuple[bytes, ...]:
    """The name of the block that the newest token completes, if it completes one."""
    if live.last_hash is None or tokens.length % block_size:
        return ()
    block = tokens.ids[tokens.length - block_size : tokens.length]
    live.last_hash = hash_block(live.last_hash, block.astype("<i4").tobytes())
    return (live.last_hash,)
