"""Packed batches against one built token by token."""

import random

import numpy as np
import pytest

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import ConfigError, SchedulerError
from pagedjax.core.plan import Row, StepPlan
from pagedjax.core.request import SamplingParams
from pagedjax.runtime.batch import build, split
from pagedjax.runtime.config import shapes_for
from pagedjax.runtime.slots import SlotTable
from pagedjax.runtime.tokens import TokenTable

CONFIG = SchedulerConfig(block_size=4, num_blocks=50, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64)
SHAPES = shapes_for(CONFIG)


class Host:
    """A token table and slots, filled as the runner fills them."""

    def __init__(self):
        self.tokens = TokenTable()
        self.slots = SlotTable(12, SHAPES.table_width, CONFIG.num_blocks)

    def add(self, sequence_id, prompt, **params):
        self.tokens.add(sequence_id, prompt, SamplingParams(**params), seed=sequence_id)
        return self.slots.assign(sequence_id, self.tokens.get(sequence_id))

    def sampled(self, sequence_id, position):
        self.slots.sampled_position[self.slots.find(sequence_id)] = position

    def build(self, *rows):
        slots = self.slots.slots(tuple(row.sequence_id for row in rows))
        self.slots.patch_tables(slots, tuple(row.blocks for row in rows))
        return build(StepPlan(0, rows), self.tokens, self.slots, SHAPES, CONFIG.block_size)


def parts(batch):
    return split(batch.packed, SHAPES, batch.num_tokens)


def test_a_mixed_batch_of_decodes_and_a_chunk():
    host = Host()
    host.add(1, [10, 11, 12], temperature=0)
    host.add(2, [20, 21, 22, 23, 24, 25, 26])
    host.add(3, [30, 31])
    host.tokens.append(1, 13)
    host.sampled(3, 2)
    batch = host.build(Row(1, 3, 1, (9,), True), Row(3, 2, 1, (8,), True), Row(2, 2, 4, (5, 6), False))
    inputs = parts(batch)
    assert batch.num_tokens == 8
    slot = host.slots.find(3)
    assert inputs.token_ids.tolist() == [13, -1 - slot, 22, 23, 24, 25, 0, 0]
    assert inputs.positions.tolist() == [3, 2, 2, 3, 4, 5, 0, 0]
    assert inputs.slots.tolist() == [39, 34, 22, 23, 24, 25, -1, -1]
    assert inputs.q_starts.tolist() == [0, 1, 2, 6, 6, 6, 6]
    assert inputs.kv_lens.tolist() == [4, 3, 6, 0, 0, 0]
    assert inputs.num_decode_rows.tolist() == [2]
    assert inputs.picked[:2].tolist() == [0, 1]
    assert inputs.block_tables[2, :2].tolist() == [5, 6]
    assert (batch.row_size, batch.sampling_rows) == (8, [0, 1])
    assert batch.fields[:2, :2].tolist() == [[host.slots.find(1), 4], [slot, 3]]
    assert set(batch.fields[2:, 0].tolist()) == {12}


def test_a_row_that_does_not_write_reads_its_own_position_from_the_cache():
    host = Host()
    host.add(1, [10, 11, 12])
    inputs = parts(host.build(Row(1, 2, 1, (9,), True, writes=False)))
    assert (inputs.slots[0], inputs.kv_lens[0], inputs.positions[0]) == (-1, 3, 2)


def test_random_batches_hold_for_every_token_what_its_row_says():
    draw = random.Random(3)
    for _ in range(50):
        host, rows = Host(), []
        for sequence_id in range(draw.randint(1, 6)):
            prompt = [draw.randrange(1000) for _ in range(draw.randint(1, 40))]
            start = draw.randrange(len(prompt))
            length = draw.choice([1, min(4, len(prompt) - start)])
            blocks = tuple(draw.sample(range(50), -(-(start + length) // 4)))
            host.add(sequence_id, prompt)
            rows.append(Row(sequence_id, start, length, blocks, draw.random() < 0.5))
        rows.sort(key=lambda row: row.length > 1)
        assert_holds(host, rows, host.build(*rows))


def assert_holds(host, rows, batch):
    inputs, packed, sampling = parts(batch), 0, []
    for index, row in enumerate(rows):
        assert inputs.q_starts[index] == packed
        assert inputs.kv_lens[index] == row.start + row.length
        for position in range(row.start, row.start + row.length):
            assert inputs.token_ids[packed] == host.tokens.tokens(row.sequence_id)[position]
            assert inputs.positions[packed] == position
            assert inputs.slots[packed] == row.blocks[position // 4] * 4 + position % 4
            packed += 1
        if row.samples:
            sampling.append(packed - 1)
    assert inputs.q_starts[len(rows) :].tolist() == [packed] * (len(inputs.q_starts) - len(rows))
    assert inputs.num_decode_rows[0] == sum(row.length == 1 for row in rows)
    assert inputs.picked[: len(sampling)].tolist() == sampling


def test_a_table_grows_shrinks_and_moves_with_its_row():
    host = Host()
    host.add(1, range(20))
    for blocks in [(3,), (3, 4), (3, 4, 9, 1), (7, 4, 9, 1), (7, 2)]:
        inputs = parts(host.build(Row(1, 0, 4, blocks, False)))
        assert inputs.block_tables[0, : len(blocks)].tolist() == list(blocks)


def test_a_new_owner_of_a_slot_does_not_see_the_old_ones_table():
    host = Host()
    slot = host.add(1, range(8))
    host.build(Row(1, 0, 8, (3, 4), True))
    host.slots.release(1)
    assert host.add(2, range(8)) == slot
    assert parts(host.build(Row(2, 0, 8, (5, 4), True))).block_tables[0, :2].tolist() == [5, 4]


def test_min_tokens_guards_the_positions_before_it_is_reached():
    host = Host()
    host.add(1, [1, 2, 3], min_tokens=2)
    for token_id, guarded in [(7, 1), (8, 1), (9, 0)]:
        length = len(host.tokens.tokens(1))
        assert host.build(Row(1, 0, length, (0, 1), True)).fields[0, 2] == guarded
        host.tokens.append(1, token_id)


@pytest.mark.parametrize("chunks", [[(0, 7)], [(0, 3), (3, 4)], [(0, 1), (1, 1), (2, 5)]])
def test_every_prompt_token_but_the_first_is_scored_once_by_the_token_before_it(chunks):
    host = Host()
    host.add(1, [10, 11, 12, 13, 14, 15, 16], prompt_logprobs=0)
    found = []
    for start, length in [*chunks, (2, 5)]:  # the last one as after a preemption
        for part in host.build(Row(1, start, length, (0, 1), False)).prompt_scoring:
            found += zip(part.sources + start, part.targets, range(part.start, part.start + len(part.targets)))
            host.tokens.get(1).num_scored = part.start + len(part.targets)
    assert found == [(i - 1, 10 + i, i) for i in range(1, 7)]


BAD_PLANS = {
    "no rows": [],
    "two rows of one sequence": [Row(1, 0, 1, (0,), True), Row(1, 1, 1, (0,), True)],
    "empty": [Row(1, 0, 0, (0,), True)],
    "do not cover": [Row(1, 0, 5, (0,), True)],
    "not all in 0..49": [Row(1, 0, 4, (50,), True)],
    "not all in": [Row(1, 0, 4, (-1,), True)],
    "at most 16 fit": [Row(1, 0, 4, tuple(range(17)), True)],
    "neither known nor just sampled": [Row(1, 20, 1, tuple(range(6)), True)],
    "known nor just": [Row(1, 18, 3, tuple(range(6)), True)],
    "at most 24 are warmed": [Row(1, 0, 20, tuple(range(5)), True), Row(2, 0, 5, (6, 7), False)],
    "not in the token table": [Row(99, 0, 1, (0,), True)],
}


@pytest.mark.parametrize(("complaint", "rows"), BAD_PLANS.items())
def test_a_plan_that_cannot_be_right_is_refused(complaint, rows):
    host = Host()
    host.add(1, range(20))
    host.add(2, range(20))
    host.slots._slot_of.setdefault(99, 5)
    with pytest.raises(SchedulerError, match=complaint):
        host.build(*rows)


def test_more_rows_than_warmed_up_are_refused():
    host = Host()
    for sequence_id in range(7):
        host.add(sequence_id, [1])
    with pytest.raises(SchedulerError, match="7 rows, at most 6"):
        host.build(*(Row(i, 0, 1, (i,), True) for i in range(7)))


def test_slots_run_out_loudly():
    host = Host()
    for sequence_id in range(12):
        host.add(sequence_id, [1])
    with pytest.raises(SchedulerError, match="no slot"):
        host.add(12, [1])


def test_arrays_are_fresh_each_step():
    host = Host()
    host.add(1, range(8))
    row = Row(1, 0, 8, (0, 1), True)
    first, second = host.build(row), host.build(row)
    assert not np.shares_memory(first.packed, second.packed)
    assert not np.shares_memory(first.fields, second.fields)


@pytest.mark.parametrize(("tokens", "seqs"), [(256, 64), (8192, 256), (1, 1), (100, 7), (65536, 1)])
def test_step_programs_are_few_and_reach_the_limits(tokens, seqs):
    shapes = shapes_for(SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs))
    assert len(shapes.token_sizes) <= 16
    assert shapes.token_sizes[-1] == tokens
    assert shapes.row_sizes[-1] >= seqs
    assert shapes.score_size in shapes.row_sizes


def test_more_than_16_step_programs_are_refused():
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        shapes_for(SchedulerConfig(max_num_batched_tokens=1_000_000))


def test_sizes_of_the_default_limits():
    shapes = shapes_for(SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=64))
    assert shapes.token_sizes == (1, 8, 16, 32, 48, 64, 96, 128, 192, 256)
    assert shapes.row_sizes == (1, 8, 16, 32, 64)
