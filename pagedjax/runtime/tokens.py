"""Host-side token ids of every live sequence: the prompt, then the tokens accepted so far."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pagedjax.core.errors import SchedulerError
from pagedjax.core.request import SamplingParams

_ROOM = 64  # tokens of room beyond the prompt at first; the array doubles when full


@dataclass(slots=True)
class SequenceTokens:
    """One sequence's ids and how to sample it. `ids[:length]` are known, the first `prompt_len` are the prompt.

    `num_scored` counts prompt tokens whose log-probabilities were already asked of the device, so that a prompt
    computed again after a preemption is not scored again. `pooling` says that hidden states are wanted, the "last" or
    the "mean" of all, and `num_pooled` counts those already asked for.
    """

    ids: np.ndarray
    length: int
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]
    num_scored: int = 1
    pooling: str | None = None
    num_pooled: int = 0


class TokenTable:
    """Growing arrays of token ids by sequence. Mutable; owned by the engine's thread."""

    def __init__(self) -> None:
        self._sequences: dict[int, SequenceTokens] = {}
        self.pooling_ids: set[int] = set()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._sequences

    def add(
        self,
        sequence_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        stop_token_ids: Iterable[int] = (),
        pooling: str | None = None,
    ) -> None:
        """Take in a sequence, whose prompt and parameters have been checked (`engine.submission`).

        `seed` is any 64-bit integer; `stop_token_ids` (end-of-sequence ids included) are kept from being sampled
        before `params.min_tokens`.
        """
        if sequence_id in self._sequences:
            raise SchedulerError(f"sequence {sequence_id} is already in the token table")
        prompt_len = len(prompt_ids)
        ids = np.empty(prompt_len + _ROOM, np.int32)
        ids[:prompt_len] = prompt_ids
        stops = tuple(sorted(set(stop_token_ids)))
        entry = SequenceTokens(ids, prompt_len, prompt_len, params, seed, stops, pooling=pooling)
        self._sequences[sequence_id] = entry
        if pooling is not None:
            self.pooling_ids.add(sequence_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Take in a sequence that goes on where its parent is now."""
        parent = self.get(parent_id)
        if child_id in self._sequences:
            raise SchedulerError(f"sequence {child_id} is already in the token table")
        self._sequences[child_id] = replace(parent, ids=parent.ids.copy())

    def append(self, sequence_id: int, token_id: int) -> SequenceTokens:
        """Add an accepted token. Gives the live entry."""
        entry = self.get(sequence_id)
        if entry.length == len(entry.ids):
            entry.ids = np.concatenate([entry.ids, np.empty_like(entry.ids)])
        entry.ids[entry.length] = token_id
        entry.length += 1
        return entry

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored, so that dropping twice is harmless."""
        self._sequences.pop(sequence_id, None)
        self.pooling_ids.discard(sequence_id)

    def get(self, sequence_id: int) -> SequenceTokens:
        """The live entry. Raises SchedulerError when there is none."""
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise SchedulerError(f"sequence {sequence_id} is not in the token table") from None

    def entries(self, sequence_ids: tuple[int, ...]) -> list[SequenceTokens]:
        """The live entries of several sequences."""
        sequences = self._sequences
        try:
            return [sequences[sequence_id] for sequence_id in sequence_ids]
        except KeyError as error:
            raise SchedulerError(f"sequence {error} is not in the token table") from None

    def tokens(self, sequence_id: int) -> np.ndarray:
        """A copy of the sequence's known ids, prompt first (int32)."""
        entry = self.get(sequence_id)
        return entry.ids[: entry.length].copy()
