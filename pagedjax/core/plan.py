"""One step's work: which tokens of which sequences, and the blocks that hold their keys and values."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Tier(StrEnum):
    """Where a block of keys and values lives."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Row(NamedTuple):
    """Tokens `start .. start + length - 1` of one sequence. (NamedTuple: 256 are made each step, at a third of a
    frozen dataclass's cost.)

    `blocks` is the sequence's block table and covers every position below `start + length`. `samples` says that
    the row ends at the sequence's last token, so the step samples the next one. The token at `start` of a decode
    row may have been sampled by the step before and be known only on the device. A row that does not write finds its
    keys and values in the cache already, in a block that others read: a fork's first row, which only needs the logits.
    """

    sequence_id: int
    start: int
    length: int
    blocks: tuple[int, ...]
    samples: bool
    writes: bool = True


class Scatter(NamedTuple):
    """Fetched blocks, from their staging on the device to the cache: pairs of (index in the fetch, device block)."""

    transfer_id: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A packed batch: rows of length 1 that decode come first, then prefill chunks. `scatters` run before the rows."""

    plan_id: int
    rows: tuple[Row, ...]
    scatters: tuple[Scatter, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)


class Fork(NamedTuple):
    """A new sequence that goes on where its parent is after this row, with a last token of its own. `block_hashes`
    as in `RowResult`."""

    sequence_id: int
    block_hashes: tuple[bytes, ...] = ()


class RowResult(NamedTuple):
    """What one row of a plan gave, in the plan's row order.

    `num_accepted` tokens are new: the one sampled and those that are *forced* behind it, which nobody need sample
    (jump-forward: a grammar allows no others). It is 0 for a chunk that does not reach the prompt's end, for one that
    `needs_confirmation` if its token is to be chosen later, and for a row whose token was forced while it ran.
    `finish` is why the sequence ended, or None; "abort" says that the row failed, so that nobody may share what it
    wrote. `block_hashes` are those of blocks that the accepted tokens complete, continuing the chain of
    `Arrived.block_hashes`. `children` are forks of the sequence, which goes on or ends beside them (beams).
    """

    sequence_id: int
    num_accepted: int
    finish: str | None = None
    block_hashes: tuple[bytes, ...] = ()
    children: tuple[Fork, ...] = ()
