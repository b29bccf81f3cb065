"""The scheduler's whole world as one value, the events that change it and the effects that it asks for.

A sequence's life (`TRANSITIONS`): it waits, runs, and leaves the running set in two phases, because a step that
contains it may still be in flight: it is first marked (yielding, finishing, aborting) and left out of new plans; when
the last step that contains it is done it is *drained*: gone, or back in line. There it is *waiting* if it has no copy
in a lower tier, else *swapping-out* until the copies have arrived and then *swapped*; *fetching* means that they are on
their way back, which needs a slot and blocks like running.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from immutables import Map

from pagedjax.core.blocks import BlockPool
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.draw import state_html
from pagedjax.core.errors import SchedulerError
from pagedjax.core.plan import RowResult, StepPlan, Tier
from pagedjax.core.request import FinishReason, Request
from pagedjax.core.tenants import Tenants
from pagedjax.core.tiers import Tiers


class Phase(StrEnum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    YIELDING = "yielding"
    SWAPPING_OUT = "swapping-out"
    SWAPPED = "swapped"
    FETCHING = "fetching"
    FINISHING = "finishing"
    ABORTING = "aborting"
    FINISHED = "finished"


class Cause(StrEnum):
    ARRIVE = "arrive"
    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"
    ABORT = "abort"
    DRAIN = "drain"
    SWAP = "swap"
    KEEP = "keep"
    STORE = "store"
    FETCH = "fetch"
    LAND = "land"
    LOSE = "lose"


TRANSITIONS: dict[tuple[Phase, Cause], Phase] = {
    (Phase.NEW, Cause.ARRIVE): Phase.WAITING,
    (Phase.WAITING, Cause.ADMIT): Phase.RUNNING,
    (Phase.WAITING, Cause.ABORT): Phase.FINISHED,
    (Phase.RUNNING, Cause.PREEMPT): Phase.YIELDING,
    (Phase.RUNNING, Cause.FINISH): Phase.FINISHING,
    (Phase.RUNNING, Cause.ABORT): Phase.ABORTING,
    (Phase.YIELDING, Cause.DRAIN): Phase.WAITING,
    (Phase.YIELDING, Cause.SWAP): Phase.SWAPPING_OUT,
    (Phase.YIELDING, Cause.KEEP): Phase.SWAPPED,
    (Phase.YIELDING, Cause.FINISH): Phase.FINISHING,
    (Phase.YIELDING, Cause.ABORT): Phase.ABORTING,
    (Phase.SWAPPING_OUT, Cause.STORE): Phase.SWAPPED,
    (Phase.SWAPPING_OUT, Cause.LOSE): Phase.WAITING,
    (Phase.SWAPPING_OUT, Cause.ADMIT): Phase.RUNNING,
    (Phase.SWAPPING_OUT, Cause.ABORT): Phase.FINISHED,
    (Phase.SWAPPED, Cause.ADMIT): Phase.RUNNING,
    (Phase.SWAPPED, Cause.FETCH): Phase.FETCHING,
    (Phase.SWAPPED, Cause.LOSE): Phase.WAITING,
    (Phase.SWAPPED, Cause.ABORT): Phase.FINISHED,
    (Phase.FETCHING, Cause.LAND): Phase.RUNNING,
    (Phase.FETCHING, Cause.PREEMPT): Phase.YIELDING,
    (Phase.FETCHING, Cause.LOSE): Phase.YIELDING,
    (Phase.FETCHING, Cause.ABORT): Phase.ABORTING,
    (Phase.FINISHING, Cause.ABORT): Phase.FINISHING,
    (Phase.FINISHING, Cause.DRAIN): Phase.FINISHED,
    (Phase.ABORTING, Cause.ABORT): Phase.ABORTING,
    (Phase.ABORTING, Cause.DRAIN): Phase.FINISHED,
}


class Stay(NamedTuple):
    """What a sequence's ways into the line and out of it leave behind; changed nowhere else.

    `since_us` is when it last came into the line or to run, `waited_us` its time in line before that. `num_served`
    tokens were computed before it was last preempted: nobody is charged for them again. Of one that is `reserved` no
    block is ever taken, and room for all its tokens is kept. `reason` is why it must yield, while it does. Its blocks
    are shared if it is `named`.
    """

    since_us: int = 0
    waited_us: int = 0
    num_served: int = 0
    reserved: bool = False
    reason: str = "memory"
    named: bool = True


class Sequence(NamedTuple):
    """One sequence and how far it is, in tokens. (NamedTuple: two are made per row and step, at half the cost of a
    frozen dataclass.)

    Confirmed by finished steps: `num_tokens` (prompt and accepted) and `num_computed` (those whose keys and values are
    in the cache). Including the plans in flight: `num_expected` tokens, `num_planned` computed; `num_in_flight`
    counts the plans that contain it. `num_cached` tokens came from the prefix cache when it was last admitted.
    `block_hashes` names every full block of its tokens so far, or none where its prefix is not to be shared.
    """

    request: Request
    arrival_us: int
    phase: Phase
    num_tokens: int
    num_expected: int
    num_computed: int
    num_planned: int
    num_cached: int
    num_in_flight: int
    blocks: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    finish: FinishReason | None = None
    stay: Stay = Stay()

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    @property
    def rank(self) -> tuple[int, int, int]:
        """Who goes first within a tenant: the smallest. Priority, then arrival; ids settle a tie."""
        return self.request.priority, self.arrival_us, self.request.sequence_id

    @property
    def awaits_choice(self) -> bool:
        """Whether its last row ended without a token, which the host is to choose once it has heard others (beams)."""
        return self.num_expected > self.num_tokens and self.num_in_flight == 0 and self.request.needs_confirmation

    @property
    def max_len(self) -> int:
        """The most tokens whose keys and values it can ever need: the last sampled one is never computed."""
        return self.request.prompt_len + self.request.max_tokens - 1


class Lane(NamedTuple):
    """The line of one tenant's requests of one priority: `parked` sequences, which have run before, by rank, and new
    ones in order of arrival (ticket -> sequence, tickets from `head` to `tail` with holes where one was taken out)."""

    parked: tuple[Sequence, ...] = ()
    line: Map[int, Sequence] = Map()
    head: int = 0
    tail: int = 0


LaneKey = tuple[str, int]  # tenant and priority


class Queue(NamedTuple):
    """What one tenant has in line."""

    num_requests: int = 0
    num_tokens: int = 0


class Waiting(NamedTuple):
    """All waiting sequences. `places` finds one by its id: its lane and its ticket there, None if it is parked.
    `queues` counts by tenant and holds only those who have somebody in line."""

    lanes: Map[LaneKey, Lane] = Map()
    places: Map[int, tuple[LaneKey, int | None]] = Map()
    queues: Map[str, Queue] = Map()
    num_tokens: int = 0

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, slots=True)
class State:
    """Everything the scheduler knows. `running` is in order of priority, then arrival; `in_flight` plans are in order
    of execution.

    `config_since` is the first plan to which the present configuration applies.

    `pending` names, for each plan in flight, the blocks that it computes (name -> block id): later plans may read them.
    `shared_tails` are partial blocks that forks hold in common (some may not be shared any more): a write copies them
    first. `suspects` may have made a step fail: each is tried alone before anybody runs with it again.
    """

    config: SchedulerConfig
    waiting: Waiting
    running: tuple[Sequence, ...]
    pool: BlockPool
    pending: tuple[Map[bytes, int], ...]
    in_flight: tuple[StepPlan, ...]
    next_plan_id: int
    now_us: int
    tiers: Tiers
    shared_tails: frozenset[int] = frozenset()
    suspects: tuple[int, ...] = ()
    tenants: Tenants = Tenants()
    config_since: int = 0

    def _repr_html_(self) -> str:
        return state_html(self)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request to queue. `block_hashes` names the full blocks of its prompt; empty, its prefix is not looked up."""

    request: Request
    block_hashes: tuple[bytes, ...]
    now_us: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """The caller is gone. An unknown id is ignored: the sequence may have finished a moment ago."""

    sequence_id: int
    now_us: int


@dataclass(frozen=True, slots=True)
class StepDue:
    """Plan the next step, if there is work and one more step may be in flight."""

    now_us: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """The oldest plan in flight is done; `results` are in its row order.

    `choices` are what sequences that await a choice get now, whose rows were done before: see `core.choosing`.
    """

    plan_id: int
    results: tuple[RowResult, ...]
    now_us: int
    choices: tuple[RowResult, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A plan in flight failed and the device's cache is lost: every block of the device, and every plan in flight.

    `suspects` are the sequences that may have caused it; none named, every row of the plan is one. Copies in the host's
    memory and on disk stay valid.
    """

    plan_id: int
    suspects: tuple[int, ...]
    now_us: int


@dataclass(frozen=True, slots=True)
class TransferDone:
    """A SwapOut has reached its tier, or a Fetch its staging; or, not `ok`, it never will."""

    transfer_id: int
    ok: bool
    now_us: int


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """From the next plan on another configuration applies; not of the blocks, whose numbers and size stay.

    Whether prefixes are shared is decided when a request arrives.
    """

    config: SchedulerConfig
    now_us: int


@dataclass(frozen=True, slots=True)
class TenantChanged:
    """The tenants' weights are others from now on; what has been counted stays. All of them are given."""

    weights: tuple[tuple[str, int], ...]
    now_us: int


Event = Arrived | Aborted | StepDue | StepDone | StepFailed | TransferDone | ConfigChanged | TenantChanged


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


def next_phase(phase: Phase, cause: Cause) -> Phase:
    """Where `cause` leads from `phase`. Raises SchedulerError if it leads nowhere."""
    target = TRANSITIONS.get((phase, cause))
    if target is None:
        raise SchedulerError(f"a {phase} sequence cannot {cause}")
    return target
