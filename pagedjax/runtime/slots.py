"""What the host mirrors of the device's slots: one slot a running sequence, held until it is preempted or done.

A slot indexes the last sampled ids and the penalty state on the device, and here the sequence's block table and its
packed sampling fields, so that a decode step gathers rows instead of building them.
"""

import numpy as np

from pagedjax.core.errors import SchedulerError
from pagedjax.runtime import sampler
from pagedjax.runtime.tokens import SequenceTokens


class SlotTable:
    """Mutable; owned by the engine's thread. `num_slots` itself is the dump slot of padded rows, with fields that
    sample greedily.

    Arrays by slot: `tables` [slots, table_width] block ids, `fields` [slots + 1, NUM_FIELDS] (see `sampler.encode`),
    and what the sequence asks for: `is_random`, `is_adjusted`, `wants_logprobs`; `wants_more` are the slots that ask
    for any of these, and not for the likeliest token alone. Lists: `free_from` the first position that min_tokens no
    longer guards, `sampled_position` that of the token in the device's last ids (-1: none).
    """

    def __init__(self, num_slots: int, table_width: int, num_blocks: int) -> None:
        self.num_slots, self.num_blocks = num_slots, num_blocks
        self.tables = np.full((num_slots, table_width), -1, np.int32)
        self.fields = np.zeros((num_slots + 1, sampler.NUM_FIELDS), np.int32)
        self.fields[:, 0] = num_slots
        self.free_from = [0] * num_slots
        self.sampled_position = [-1] * num_slots
        self.is_random = np.zeros(num_slots, bool)
        self.is_adjusted = np.zeros(num_slots, bool)
        self.wants_logprobs = np.zeros(num_slots, bool)
        self.wants_more: set[int] = set()
        self._blocks: list[tuple[int, ...]] = [()] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def find(self, sequence_id: int) -> int | None:
        return self._slot_of.get(sequence_id)

    def slots(self, sequence_ids: tuple[int, ...]) -> list[int]:
        """The slots of sequences that all have one."""
        slot_of = self._slot_of
        return [slot_of[sequence_id] for sequence_id in sequence_ids]

    def without_slot(self, sequence_ids: tuple[int, ...]) -> list[int]:
        slot_of = self._slot_of
        return [sequence_id for sequence_id in sequence_ids if sequence_id not in slot_of]

    def assign(self, sequence_id: int, entry: SequenceTokens) -> int:
        """Give a sequence a slot and fill in how it samples. Raises SchedulerError when all are taken."""
        if not self._free:
            raise SchedulerError(f"no slot is free for sequence {sequence_id}: {self.num_slots} are taken")
        slot = self._slot_of[sequence_id] = self._free.pop()
        params = entry.params
        self.fields[slot] = sampler.encode(params, entry.seed, slot)
        self.free_from[slot] = entry.prompt_len + params.min_tokens
        self.sampled_position[slot] = -1
        self.is_random[slot] = params.temperature >= sampler.GREEDY_BELOW
        self.is_adjusted[slot] = sampler.needs_adjusting(params)
        self.wants_logprobs[slot] = params.logprobs is not None
        if self.is_random[slot] or self.is_adjusted[slot] or self.wants_logprobs[slot]:
            self.wants_more.add(slot)
        return slot

    def release(self, sequence_id: int) -> int | None:
        """Take a sequence's slot back and name it. Sequences without one are ignored: they may never have run."""
        slot = self._slot_of.pop(sequence_id, None)
        if slot is not None:
            self._blocks[slot] = ()
            self._free.append(slot)
            self.wants_more.discard(slot)
        return slot

    def note_sampled(self, slots: list[int], positions: list[int]) -> None:
        """The device's last ids of these slots are those of the tokens at these positions."""
        for slot, position in zip(slots, positions):
            self.sampled_position[slot] = position

    def patch_tables(self, slots: list[int], blocks: tuple[tuple[int, ...], ...]) -> None:
        """Bring the block tables of `slots` up to date; a table that is the same object as last time costs nothing.

        Raises SchedulerError for a block id out of range or a table that is too long.
        """
        known = self._blocks
        for slot, new in zip(slots, blocks):
            if known[slot] is not new:
                self._patch(slot, known[slot], new)

    def _patch(self, slot: int, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        kept = len(old) if new[: len(old)] == old else 0
        tail = np.array(new[kept:], np.int64)
        width = self.tables.shape[1]
        if len(new) > width:
            raise SchedulerError(f"a block table has {len(new)} blocks, at most {width} fit max_model_len")
        if len(tail) and (tail.min() < 0 or tail.max() >= self.num_blocks):
            raise SchedulerError(f"block ids {new[kept:]} are not all in 0..{self.num_blocks - 1}")
        self.tables[slot, kept : len(new)] = tail
        self._blocks[slot] = new
