"""What the scheduler asks for, to be carried out in order."""

from typing import NamedTuple

from pagedjax.core.plan import StepPlan, Tier
from pagedjax.core.request import FinishReason


class RunStep(NamedTuple):
    plan: StepPlan


class CopyBlocks(NamedTuple):
    """Copy device blocks, (source, target) each, before the RunStep of the same effects."""

    pairs: tuple[tuple[int, int], ...]


class SwapOut(NamedTuple):
    """Gather device blocks now, before any later RunStep, and bring them to `tier`: moves are (device block, block of
    that tier). The device blocks are free at once; the others are in transfer until TransferDone."""

    transfer_id: int
    tier: Tier
    moves: tuple[tuple[int, int], ...]


class Fetch(NamedTuple):
    """Bring blocks of `tier` to a staging array on the device. Ends with TransferDone; a later plan scatters them."""

    transfer_id: int
    tier: Tier
    block_ids: tuple[int, ...]


class Discard(NamedTuple):
    """A finished fetch that nobody will scatter: free its staging."""

    transfer_id: int


class Preempt(NamedTuple):
    """The sequence is back in line and its blocks are given up; `num_lost_tokens` must be computed again
    (fewer, where the device still has them when it resumes).

    `method` is "swap" (everything it has computed has a copy in a lower tier), "partial" (a leading part has) or
    "recompute"; `reason` says why it had to yield: "memory", "priority", "slots", "fairness" or "failure".
    """

    sequence_id: int
    num_lost_tokens: int
    method: str = "recompute"
    reason: str = "memory"


class Finish(NamedTuple):
    sequence_id: int
    reason: FinishReason


class Reject(NamedTuple):
    """The request can never run, or the queue is full. `code` is OpenAI's."""

    sequence_id: int
    code: str
    message: str


Effect = CopyBlocks | SwapOut | Fetch | Discard | RunStep | Preempt | Finish | Reject
