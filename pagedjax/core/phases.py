"""A sequence's life, as data.

It waits, runs, and leaves the running set in two phases, because a step that
contains it may still be in flight: it is first marked (yielding, finishing, aborting) and left out of new plans; when
the last step that contains it is done it is *drained*: gone, or back in line. There it is *waiting* if it has no copy
in a lower tier, else *swapping-out* until the copies have arrived and then *swapped*; *fetching* means that they are on
their way back, which needs a slot and blocks like running.
"""

from enum import StrEnum

from pagedjax.core.errors import SchedulerError


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


def next_phase(phase: Phase, cause: Cause) -> Phase:
    """Where `cause` leads from `phase`. Raises SchedulerError if it leads nowhere."""
    target = TRANSITIONS.get((phase, cause))
    if target is None:
        raise SchedulerError(f"a {phase} sequence cannot {cause}")
    return target
