"""From a plan to what the device takes: one packed int32 array for the step and one for its sampler.

Each input of a program costs dispatch time, so everything travels in one array that the program slices. The arrays
are fresh each step, since the CPU's device may read them in place while the next step is built.
"""

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from pagedjax.core.errors import SchedulerError
from pagedjax.core.plan import StepPlan
from pagedjax.runtime.config import Shapes, size_for
from pagedjax.runtime.slots import SlotTable
from pagedjax.runtime.tokens import SequenceTokens, TokenTable

Array = TypeVar("Array", np.ndarray, jax.Array)


class StepInputs(NamedTuple):
    """The parts of a step's packed array, int32, for T tokens, R rows, P picked rows and tables W wide.

    A negative token id -1 - s stands for the last id sampled in slot s. `slots` are the cache's token slots
    (block_id * block_size + offset, -1 for padding and for rows that do not write), `picked` the packed tokens whose
    hidden states go to the head.
    """

    token_ids: np.ndarray | jax.Array  # [T]
    positions: np.ndarray | jax.Array  # [T]
    slots: np.ndarray | jax.Array  # [T]
    q_starts: np.ndarray | jax.Array  # [R + 1]
    kv_lens: np.ndarray | jax.Array  # [R]
    num_decode_rows: np.ndarray | jax.Array  # [1]
    picked: np.ndarray | jax.Array  # [P]
    block_tables: np.ndarray | jax.Array  # [R, W]


class PromptScoring(NamedTuple):
    """Prompt tokens to score: `targets` are the ids at positions `start` and on of the plan's row `row`, `sources`
    the packed tokens before them."""

    row: int
    start: int
    sources: np.ndarray
    targets: np.ndarray


class DeviceBatch(NamedTuple):
    """A padded step. Sampler rows are the plan's sampling rows, in order: `sampling_rows` are their indices,
    `sampling_slots` their slots, `next_positions` those of the tokens that they sample, and `fields` [P, NUM_FIELDS]
    their packed fields, padded; the first `row_size` rows go to the sampler. `is_decode`: each row has one token."""

    num_tokens: int
    is_decode: bool
    packed: np.ndarray
    row_size: int
    fields: np.ndarray
    sampling_rows: list[int]
    sampling_slots: list[int]
    next_positions: list[int]
    prompt_scoring: tuple[PromptScoring, ...]


def packed_size(shapes: Shapes, num_tokens: int) -> int:
    size: int = _places(shapes, num_tokens)[-1].stop
    return size


def split(packed: Array, shapes: Shapes, num_tokens: int) -> StepInputs:
    """The parts of a packed array for `num_tokens` (one of the sizes): views in numpy, slices in a program."""
    parts = [packed[place] for place in _places(shapes, num_tokens)]
    return StepInputs(*parts[:-1], parts[-1].reshape(-1, shapes.table_width))


def build(plan: StepPlan, tokens: TokenTable, slots: SlotTable, shapes: Shapes, block_size: int) -> DeviceBatch:
    """The padded batch of a plan. Reads only: every sequence has its slot, and the slots' tables are up to date.

    Raises SchedulerError for a plan that cannot be right: over the limits, a table that does not cover a row, a token
    that is neither known nor the one just sampled, which can be had by the rows of one token that lead the plan.
    """
    rows = _columns(plan, tokens, slots)
    _check(rows, shapes, block_size)
    num_rows, total = len(rows.starts), rows.q_starts[-1]
    num_tokens = size_for(total, shapes.token_sizes)
    packed = np.zeros(packed_size(shapes, num_tokens), np.int32)
    parts = split(packed, shapes, num_tokens)
    parts.block_tables[:num_rows] = slots.tables[rows.slots]
    parts.slots[total:] = -1
    is_decode = total == num_rows
    num_decodes = num_rows if is_decode else next(row for row, length in enumerate(rows.lengths) if length != 1)
    _fill_decodes(parts, rows, num_decodes, slots, block_size)
    for row in range(num_decodes, num_rows):
        _fill_chunk(parts, rows, row, block_size)
    parts.q_starts[: num_rows + 1] = rows.q_starts
    parts.q_starts[num_rows + 1 :] = total
    parts.kv_lens[:num_rows] = rows.ends
    parts.num_decode_rows[0] = num_decodes
    sampling = [row for row, samples in enumerate(rows.samples) if samples]
    parts.picked[: len(sampling)] = [rows.q_starts[row + 1] - 1 for row in sampling]
    return DeviceBatch(
        num_tokens, is_decode, packed, *_sampler_rows(rows, sampling, slots, shapes), _prompt_scoring(rows)
    )


class _Rows(NamedTuple):
    """The plan's rows as columns. Lists: arrays take twice as long for 8 rows, and a third less for 256."""

    entries: list[SequenceTokens]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    ends: list[int]
    blocks: tuple[tuple[int, ...], ...]
    samples: tuple[bool, ...]
    writes: tuple[bool, ...]
    slots: list[int]
    q_starts: list[int]


def _columns(plan: StepPlan, tokens: TokenTable, slots: SlotTable) -> _Rows:
    if not plan.rows:
        raise SchedulerError(f"plan {plan.plan_id} has no rows")
    sequence_ids, starts, lengths, blocks, samples, writes = zip(*plan.rows)
    if len(set(sequence_ids)) != len(sequence_ids):
        raise SchedulerError(f"plan {plan.plan_id} has two rows of one sequence")
    entries, ends = tokens.entries(sequence_ids), [start + length for start, length in zip(starts, lengths)]
    q_starts = [0, *accumulate(lengths)]
    return _Rows(entries, starts, lengths, ends, blocks, samples, writes, slots.slots(sequence_ids), q_starts)


def _check(rows: _Rows, shapes: Shapes, block_size: int) -> None:
    _require(min(rows.lengths) > 0 and min(rows.starts) >= 0, lambda: "a row is empty or starts below 0")
    most = shapes.token_sizes[-1]
    _require(rows.q_starts[-1] <= most, lambda: f"a plan has {rows.q_starts[-1]} tokens, at most {most} are warmed up")
    num_rows = len(rows.starts)
    most_rows = shapes.max_rows
    _require(num_rows <= most_rows, lambda: f"a plan has {num_rows} rows, at most {most_rows} are warmed up")
    num_blocks = [len(blocks) for blocks in rows.blocks]
    _require(
        all(count * block_size >= end for count, end in zip(num_blocks, rows.ends)),
        lambda: f"block tables of {num_blocks} blocks of {block_size} do not cover rows that end at {rows.ends}",
    )


def _require(holds: bool, complaint: Callable[[], str]) -> None:
    if not holds:
        raise SchedulerError(complaint())


def _fill_decodes(parts: StepInputs, rows: _Rows, num_rows: int, slots: SlotTable, block_size: int) -> None:
    """The tokens of the leading rows, which have one each: their ids, positions and places in the cache."""
    starts, slot_ids = rows.starts[:num_rows], rows.slots[:num_rows]
    is_known = [start < entry.length for start, entry in zip(starts, rows.entries)]
    sampled = slots.sampled_position
    for known, start, slot in zip(is_known, starts, slot_ids):
        if not known and sampled[slot] != start:
            raise SchedulerError(f"token {start} is neither known nor just sampled")
    parts.token_ids[:num_rows] = [
        entry.ids[start] if known else -1 - slot
        for known, entry, start, slot in zip(is_known, rows.entries, starts, slot_ids)
    ]
    parts.positions[:num_rows] = starts
    parts.slots[:num_rows] = [
        blocks[start // block_size] * block_size + start % block_size if writes else -1
        for blocks, start, writes in zip(rows.blocks, starts, rows.writes)
    ]


def _fill_chunk(parts: StepInputs, rows: _Rows, row: int, block_size: int) -> None:
    """The tokens of a row that has several."""
    first, past, start, end = rows.q_starts[row], rows.q_starts[row + 1], rows.starts[row], rows.ends[row]
    entry = rows.entries[row]
    _require(end <= entry.length, lambda: f"tokens before {end} are neither known nor just sampled")
    parts.token_ids[first:past] = entry.ids[start:end]
    positions = parts.positions[first:past] = np.arange(start, end)
    places = parts.block_tables[row, positions // block_size] * block_size + positions % block_size
    parts.slots[first:past] = places if rows.writes[row] else -1


def _sampler_rows(
    rows: _Rows, sampling: list[int], slots: SlotTable, shapes: Shapes
) -> tuple[int, np.ndarray, list[int], list[int], list[int]]:
    num_sampling = len(sampling)
    sampling_slots, next_positions = [rows.slots[row] for row in sampling], [rows.ends[row] for row in sampling]
    fields = np.empty((shapes.num_picked, slots.fields.shape[1]), np.int32)
    fields[:num_sampling] = slots.fields[sampling_slots]
    fields[num_sampling:] = slots.fields[slots.num_slots]
    fields[:num_sampling, 1] = next_positions
    fields[:num_sampling, 2] = [end < slots.free_from[slot] for end, slot in zip(next_positions, sampling_slots)]
    return size_for(num_sampling, shapes.row_sizes), fields, sampling, sampling_slots, next_positions


def _prompt_scoring(rows: _Rows) -> tuple[PromptScoring, ...]:
    found = []
    for row, entry in enumerate(rows.entries):
        if entry.params.prompt_logprobs is None or entry.num_scored >= entry.prompt_len:
            continue
        start, first = rows.starts[row], entry.num_scored
        past = min(rows.ends[row] + 1, entry.prompt_len)
        _require(start < first, lambda: "a prompt that wants log-probabilities skipped tokens by a prefix hit")
        if first < past:
            sources = np.arange(first - 1, past - 1) - start + rows.q_starts[row]
            found.append(PromptScoring(row, first, sources.astype(np.int32), entry.ids[first:past].copy()))
    return tuple(found)


@cache
def _places(shapes: Shapes, num_tokens: int) -> tuple[slice, ...]:
    """Where each part lies in a packed array."""
    num_rows = shapes.num_rows(num_tokens)
    rows = (num_rows + 1, num_rows, 1, shapes.num_picked, num_rows * shapes.table_width)
    ends = list(accumulate((num_tokens, num_tokens, num_tokens, *rows)))
    return tuple(map(slice, [0, *ends], ends))
