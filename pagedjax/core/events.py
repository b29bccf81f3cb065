"""The events that change the scheduler's state. Each brings the time, in microseconds."""

from dataclasses import dataclass

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.plan import RowResult
from pagedjax.core.request import Request


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
