"""How full the engine is: the little of the scheduler's state that admitting requests needs, as a message carries it.

The asyncio side refuses what cannot be queued before it sends anything. It knows the line as it was at the end of the
latest step, and what it has sent since, so the line is bounded however long a step takes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pagedjax.core.arriving import refusal, refused_param
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import RequestError
from pagedjax.core.state import Queue, State
from pagedjax.engine.submission import Submission, check_queue


@dataclass(frozen=True, slots=True)
class Line:
    """Those who wait, in sequences and tokens; `queues` counts by tenant."""

    num_requests: int = 0
    num_tokens: int = 0
    queues: Mapping[str, Queue] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.num_requests


@dataclass(frozen=True, slots=True)
class Load:
    """A state's limits and its line, and how many sequences of each tenant run."""

    config: SchedulerConfig
    waiting: Line = Line()
    running: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        line, limits = self.waiting, self.config
        return len(line) >= limits.max_queued_requests or line.num_tokens >= limits.max_queued_tokens


def load_of(state: State) -> Load:
    waiting = state.waiting
    running = dict(Counter([sequence.request.tenant for sequence in state.running]))
    return Load(state.config, Line(len(waiting), waiting.num_tokens, dict(waiting.queues)), running)


class Admission:
    """Mutable; belongs to the event loop. The latest Load, and what is on its way to the step loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._load = Load(config)
        self._on_the_way: dict[str, Submission] = {}
        self._num_tokens = 0
        self._num_requests = 0
        self._by_tenant: dict[str, Queue] = {}

    @property
    def load(self) -> Load:
        """Those on their way count as waiting."""
        line = self._load.waiting
        queues = {**line.queues, **{name: self._queue(name) for name in self._by_tenant}}
        return Load(self._load.config, self._line(queues), self._load.running)

    def refused(self, requests: Sequence[Submission]) -> tuple[str, RequestError] | None:
        """The tenant of the first request that is to be refused as things are, and why; None to queue them all.

        Raises RequestError for requests that together would wait for ever.
        """
        check_queue(requests, self._load.config)
        for request in requests:
            now = Load(self._load.config, self._line({request.tenant: self._queue(request.tenant)}))
            refused = refusal(now, request.for_scheduler(0))
            if refused is not None:
                param = refused_param(now, request.for_scheduler(0))
                return request.tenant, RequestError(refused.message, param=param, code=refused.code)
        return None

    def sent(self, request: Submission) -> None:
        self._on_the_way[request.request_id] = request
        self._count(request, 1)

    def arrived(self, request_ids: Iterable[str], load: Load | None) -> None:
        """The step loop has taken these in; `load` is None where it has not changed."""
        for request_id in request_ids:
            self._count(self._on_the_way.pop(request_id), -1)
        self._load = load or self._load

    def _count(self, request: Submission, sign: int) -> None:
        num_requests = sign * request.params.num_samples
        num_tokens = num_requests * len(request.prompt_token_ids)
        self._num_requests += num_requests
        self._num_tokens += num_tokens
        known = self._by_tenant.get(request.tenant, Queue())
        queue = Queue(known.num_requests + num_requests, known.num_tokens + num_tokens)
        if queue.num_requests:
            self._by_tenant[request.tenant] = queue
        else:
            self._by_tenant.pop(request.tenant)

    def _line(self, queues: Mapping[str, Queue]) -> Line:
        line = self._load.waiting
        return Line(line.num_requests + self._num_requests, line.num_tokens + self._num_tokens, queues)

    def _queue(self, tenant: str) -> Queue:
        waiting, coming = self._load.waiting.queues.get(tenant, Queue()), self._by_tenant.get(tenant, Queue())
        return Queue(waiting.num_requests + coming.num_requests, waiting.num_tokens + coming.num_tokens)
