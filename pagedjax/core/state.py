"""The scheduler's whole world as one value."""

from typing import NamedTuple

from immutables import Map

from pagedjax.core.blocks import BlockPool
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.draw import state_html
from pagedjax.core.phases import Phase
from pagedjax.core.plan import StepPlan
from pagedjax.core.prefix import Filled
from pagedjax.core.request import FinishReason, Request
from pagedjax.core.tenants import Tenants
from pagedjax.core.tiers import Tiers


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


class State(NamedTuple):
    """Everything the scheduler knows. (NamedTuple: five are made per step, at a third of a frozen dataclass's cost.)

    `running` is in order of priority, then arrival; `in_flight` plans are in order of execution.

    `config_since` is the first plan to which the present configuration applies.

    `pending` names, for each plan in flight, the blocks that it computes (name -> block id): later plans may read them.
    `shared_tails` are partial blocks that forks hold in common (some may not be shared any more): a write copies them
    first. `suspects` may have made a step fail: each is tried alone before anybody runs with it again.
    """

    config: SchedulerConfig
    waiting: Waiting
    running: tuple[Sequence, ...]
    pool: BlockPool
    pending: tuple[Filled, ...]
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
