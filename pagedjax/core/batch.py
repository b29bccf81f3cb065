"""The step being planned, row by row."""

from collections import Counter, defaultdict
from typing import NamedTuple

from pagedjax.core.effects import Effect
from pagedjax.core.plan import Row
from pagedjax.core.policy import Order
from pagedjax.core.state import Sequence, State
from pagedjax.core.tenants import PROMPT_COST, SAMPLE_COST


class Batch(NamedTuple):
    """What is planned so far; its lists and dictionaries grow.

    The rows, the named blocks that they fill (name -> block id), their cost in service tokens (tenant -> cost), that of
    sampled tokens when it is `booked` (`samplers` names a tenant for each), and the effects that come before the step.
    `order` says who goes first. `alone` is the one sequence that may run in the step, if that is to be tried alone.
    """

    decodes: list[Row]
    chunks: list[Row]
    filled: dict[bytes, int]
    service: defaultdict[str, int]
    samplers: list[str]
    effects: list[Effect]
    order: Order
    alone: int | None

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*self.decodes, *self.chunks)

    def booked(self) -> defaultdict[str, int]:
        """The step's cost so far. (Counted in one go: adding up row by row takes three times as long.)"""
        for tenant, num_sampled in Counter(self.samplers).items():
            self.service[tenant] += SAMPLE_COST * num_sampled
        self.samplers.clear()
        return self.service

    def leaves_out(self, state: State, sequence_id: int) -> bool:
        return sequence_id in state.suspects if self.alone is None else sequence_id != self.alone


def plan_row(batch: Batch, sequence: Sequence, length: int, block_size: int, writes: bool = True) -> Sequence:
    """Add the next `length` tokens of a sequence, which has the blocks for them, to the batch."""
    # Unpacked, and made by tuple.__new__: a quarter of the time of _replace, and this runs for every row of every step.
    (
        request,
        arrival_us,
        phase,
        num_tokens,
        num_expected,
        num_computed,
        start,
        num_cached,
        num_in_flight,
        blocks,
        names,
        finish,
        stay,
    ) = sequence
    end = start + length
    samples = end == num_expected
    if samples:
        batch.samplers.append(request.tenant)
    if start < request.prompt_len:
        num_new = min(end, request.prompt_len) - max(start, stay.num_served)
        batch.service[request.tenant] += PROMPT_COST * max(0, num_new)
    row = tuple.__new__(Row, (request.sequence_id, start, length, blocks, samples, writes))
    (batch.decodes if length == 1 else batch.chunks).append(row)
    if end % block_size < length:
        filled = slice(start // block_size, end // block_size)
        batch.filled.update(zip(names[filled], blocks[filled]))
    advanced = (
        request,
        arrival_us,
        phase,
        num_tokens,
        num_expected + samples,
        num_computed,
        end,
        num_cached,
        num_in_flight + 1,
        blocks,
        names,
        finish,
        stay,
    )
    return tuple.__new__(Sequence, advanced)
