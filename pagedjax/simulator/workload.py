"""What arrives, and when: records of requests, and small seeded mixes of them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from pagedjax.core.errors import ConfigError
from pagedjax.core.request import Request
from pagedjax.core.tenants import DEFAULT_TENANT


class SimRequest(NamedTuple):
    """One request of the simulated world. Lengths are in tokens.

    It ends after `output_len` tokens; `max_tokens`, what the scheduler is told, is that unless given (a stop token
    comes before the limit, and nobody knows when). Its first `prefix_len` tokens are those of all requests with the
    same `prefix`. `block_names`, where given, name every full block of the prompt instead. With a `sample_index` it is
    one more sample of the request that came so many places before it: the same prompt, whose blocks it shares.
    """

    arrival_us: int
    prompt_len: int
    output_len: int
    max_tokens: int | None = None
    priority: int = 0
    tenant: str = DEFAULT_TENANT
    preemptible: bool = True
    prefix: str = ""
    prefix_len: int = 0
    block_names: tuple[bytes, ...] | None = None
    sample_index: int = 0

    def for_scheduler(self, sequence_id: int) -> Request:
        return Request(
            sequence_id,
            self.prompt_len,
            self.max_tokens or self.output_len,
            self.priority,
            sequence_id - self.sample_index if self.sample_index else None,
            tenant=self.tenant,
            preemptible=self.preemptible,
        )

    def has_names(self, block_size: int) -> bool:
        """Whether its full blocks have names, those it fills later too."""
        return self.block_names is None or bool(self.block_names) or self.prompt_len < block_size

    def names(self, sequence_id: int, block_size: int) -> tuple[bytes, ...]:
        """The names of the prompt's full blocks, as long as hashes."""
        if self.block_names is not None:
            return self.block_names
        num_full, num_shared = self.prompt_len // block_size, min(self.prefix_len, self.prompt_len) // block_size
        shared = tuple([b"%24s%8d" % (self.prefix.encode()[:24], index) for index in range(num_shared)])
        return shared + unique_names(sequence_id - self.sample_index, num_shared, num_full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One class of requests: Poisson arrivals at `rate` a second (all at `start_s` if infinite), lengths log-normal
    around a median, with the standard deviation of their logarithm, cut to 1..max. Prompts begin with `prefix_len`
    tokens that are common to the class, and come on top."""

    num_requests: int
    rate: float
    prompt_median: float
    output_median: float
    prefix_len: int = 0
    prompt_sigma: float = 0.0
    output_sigma: float = 0.0
    max_prompt_len: int = 1_000_000
    max_output_len: int = 1_000_000
    max_tokens: int | None = None
    priority: int = 0
    tenant: str = DEFAULT_TENANT
    start_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 0 or not self.rate > 0 or min(self.prompt_median, self.output_median) < 1:
            raise ConfigError(f"traffic needs a rate above 0 and lengths of at least 1, not {self}")
        if self.max_tokens is not None and self.max_tokens < self.max_output_len:
            raise ConfigError(f"max_tokens {self.max_tokens} must reach max_output_len {self.max_output_len}")


def mix(*classes: Traffic) -> tuple[SimRequest, ...]:
    """The requests of all classes in order of arrival."""
    return tuple(sorted((r for traffic in classes for r in _draw(traffic)), key=lambda r: r.arrival_us))


def _draw(traffic: Traffic) -> Iterable[SimRequest]:
    random, now_s = Random(traffic.seed), traffic.start_s
    for _ in range(traffic.num_requests):
        now_s += 0.0 if math.isinf(traffic.rate) else random.expovariate(traffic.rate)
        yield SimRequest(
            arrival_us=round(now_s * 1e6),
            prompt_len=traffic.prefix_len
            + _length(random, traffic.prompt_median, traffic.prompt_sigma, traffic.max_prompt_len),
            output_len=_length(random, traffic.output_median, traffic.output_sigma, traffic.max_output_len),
            max_tokens=traffic.max_tokens,
            priority=traffic.priority,
            tenant=traffic.tenant,
            prefix=f"traffic {traffic.seed}",
            prefix_len=traffic.prefix_len,
        )


def _length(random: Random, median: float, sigma: float, longest: int) -> int:
    return min(max(1, round(random.lognormvariate(math.log(median), sigma))), longest)


def unique_names(sequence_id: int, start: int, stop: int) -> tuple[bytes, ...]:
    """Names of blocks that no other sequence has, as long as a hash."""
    return tuple([b"%16d%16d" % (sequence_id, index) for index in range(start, stop)])
