"""What a finished step leaves behind: tokens accepted, blocks named, sequences ended, children born.

Behind a sampled token others may be *forced* (`RowResult`): they are accepted with it, and computed like a prompt's, in
one chunk. A row in flight that was to sample the first of them ends before the sequence's last token then; what it
samples is known, and counts no more.
"""

from collections import Counter
from operator import itemgetter

from pagedjax.core.blocks import register
from pagedjax.core.choosing import choose
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Effect
from pagedjax.core.errors import SchedulerError
from pagedjax.core.events import StepDone
from pagedjax.core.failing import without_cleared
from pagedjax.core.forking import add_children, leave_for_slots
from pagedjax.core.leaving import drain
from pagedjax.core.phases import Cause, Phase, next_phase
from pagedjax.core.plan import Row, RowResult, StepPlan
from pagedjax.core.prefix import check_names
from pagedjax.core.request import FinishReason
from pagedjax.core.state import Sequence, State
from pagedjax.core.tenants import SAMPLE_COST, Tenants, charge

_REASONS = frozenset(FinishReason)
_ENDED = (Phase.FINISHING, Phase.ABORTING)
# Half the time of an attribute by name, for what is read of every row of every step.
_SEQUENCE_ID, _CHILDREN = itemgetter(0), itemgetter(RowResult._fields.index("children"))
_SAMPLES = itemgetter(Row._fields.index("samples"))
_NUM_ACCEPTED = itemgetter(RowResult._fields.index("num_accepted"))


def step_done(state: State, event: StepDone) -> tuple[State, tuple[Effect, ...]]:
    plan = _oldest_plan(state, event)
    tenants = _charged(state, plan, event.results)
    sequences = {s.request.sequence_id: s for s in state.running}
    for row, result in zip(plan.rows, event.results):
        sequence_id = row[0]
        sequences[sequence_id] = _accept(sequences[sequence_id], row, result, state.config)
    named_blocks = _filled_blocks(plan, event.results, sequences, state.config.block_size)
    state = state._replace(
        running=tuple(sequences.values()),
        pool=register(state.pool, named_blocks) if named_blocks else state.pool,
        pending=state.pending[1:],
        in_flight=state.in_flight[1:],
        tenants=tenants,
    )
    if state.suspects:
        state = state._replace(suspects=without_cleared(state.suspects, plan, event.results))
    if not event.choices and not any(map(_CHILDREN, event.results)):
        return drain(state)
    state, effects = choose(state, event.choices)
    state, drained = drain(add_children(state, plan, event.results, event.choices))
    state, more = leave_for_slots(state, event.results + event.choices)
    return state, effects + drained + more


def _charged(state: State, plan: StepPlan, results: tuple[RowResult, ...]) -> Tenants:
    """The accounts with each new token paid once. A sample was when it was planned: those that are thrown away, since
    their sequences had ended or they are known, are refunded, but not that of a row that fails. Forced tokens cost as
    much as sampled ones."""
    any_ended = any(s.phase in _ENDED for s in state.running)
    if not any_ended and list(map(_SAMPLES, plan.rows)) == list(map(_NUM_ACCEPTED, results)):
        return state.tenants
    sequences, num_owed = {s.sequence_id: s for s in state.running}, Counter[str]()
    for row, result in zip(plan.rows, results):
        sequence = sequences[row.sequence_id]
        if sequence.phase in _ENDED or not _is_due(sequence, row):
            num_owed[sequence.request.tenant] -= row.samples
        elif result.num_accepted > 1:
            num_owed[sequence.request.tenant] += result.num_accepted - 1
    return charge(state.tenants, {tenant: SAMPLE_COST * num for tenant, num in num_owed.items() if num})


def _oldest_plan(state: State, event: StepDone) -> StepPlan:
    plan = state.in_flight[0] if state.in_flight else None
    if plan is None or plan.plan_id != event.plan_id:
        raise SchedulerError(f"plan {event.plan_id} is not the oldest in flight")
    if list(map(_SEQUENCE_ID, plan.rows)) != list(map(_SEQUENCE_ID, event.results)):
        raise SchedulerError(f"the results of plan {event.plan_id} do not match its rows")
    return plan


def _accept(sequence: Sequence, row: Row, result: RowResult, config: SchedulerConfig) -> Sequence:
    """Confirm one row. What it gave is discarded if the sequence has ended in the meantime."""
    # Unpacked, and made by tuple.__new__: a quarter of the time of _replace, and this runs for every row of every step.
    _, start, length, _, samples, _ = row
    _, num_accepted, end, new_names, _ = result
    (
        request,
        arrival_us,
        phase,
        num_tokens,
        num_expected,
        _,
        num_planned,
        num_cached,
        num_in_flight,
        blocks,
        names,
        finish,
        stay,
    ) = sequence
    if phase is not Phase.FINISHING and phase is not Phase.ABORTING:
        # `_is_due`, without a call.
        is_due = samples and start + length == num_tokens
        num_tokens += num_accepted
        if num_accepted != is_due or end is not None or num_tokens - request.prompt_len >= request.max_tokens:
            num_expected = max(num_expected, num_tokens)
            if not _goes_on(sequence, row, result):
                phase, finish = next_phase(phase, Cause.FINISH), _reason(sequence, row, result)
        if new_names and stay.named:
            names += new_names
            check_names(request.sequence_id, names, num_tokens, config.block_size)
    accepted = (
        request,
        arrival_us,
        phase,
        num_tokens,
        num_expected,
        start + length,
        num_planned,
        num_cached,
        num_in_flight - 1,
        blocks,
        names,
        finish,
        stay,
    )
    return tuple.__new__(Sequence, accepted)


def _is_due(sequence: Sequence, row: Row) -> bool:
    """Whether a row gives a token: it samples one, which was not forced while it ran."""
    return row.samples and row.start + row.length == sequence.num_tokens


def _goes_on(sequence: Sequence, row: Row, result: RowResult) -> bool:
    """Whether a sequence does whose row has not just given the token that was due: it awaits a choice, or others are
    forced behind that token."""
    request = sequence.request
    if result.finish is not None or not _is_due(sequence, row):
        return False
    if request.needs_confirmation:
        return not result.num_accepted
    num_output = sequence.num_tokens + result.num_accepted - request.prompt_len
    return result.num_accepted > 1 and num_output < request.max_tokens


def _reason(sequence: Sequence, row: Row, result: RowResult) -> FinishReason:
    """Why a sequence ends with this row. Raises if the result is neither an end nor what a row gives that goes on."""
    request = sequence.request
    if not _is_due(sequence, row):
        most = 0
    elif request.needs_confirmation:
        most = 1
    else:
        most = request.prompt_len + request.max_tokens - sequence.num_tokens
    least = 1 if most and result.finish is None else 0
    if not least <= result.num_accepted <= most:
        raise SchedulerError(f"row {row} cannot accept {result.num_accepted} tokens")
    if result.finish is None:
        raise SchedulerError(f"sequence {sequence.sequence_id} has all its tokens and is not finished")
    if result.finish not in _REASONS:
        raise SchedulerError(f"sequence {sequence.sequence_id} ends for no known reason: {result.finish}")
    return FinishReason(result.finish)


def _filled_blocks(
    plan: StepPlan, results: tuple[RowResult, ...], sequences: dict[int, Sequence], block_size: int
) -> list[tuple[bytes, int]]:
    """The named blocks that a finished plan has computed, in its row order, but not those of rows that failed; and
    those that it has scattered."""
    named_blocks: list[tuple[bytes, int]] = []
    for (sequence_id, start, length, blocks, _, _), result in zip(plan.rows, results):
        end = start + length
        if end % block_size < length and result.finish != FinishReason.ABORT:
            filled = slice(start // block_size, end // block_size)
            named_blocks += zip(sequences[sequence_id].block_hashes[filled], blocks[filled])
    if plan.scatters:
        scattered = {block_id for scatter in plan.scatters for _, block_id in scatter.pairs}
        for row in plan.rows:
            named = zip(sequences[row.sequence_id].block_hashes[: row.start // block_size], row.blocks)
            named_blocks += [(name, block_id) for name, block_id in named if block_id in scattered]
    return named_blocks
