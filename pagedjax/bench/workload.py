"""What to send and when: a workload is a pure function of its configuration.

Prompts, lengths and arrivals draw from generators of their own, so that changing the rate keeps the prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

from pagedjax.bench.traces import MOONCAKE_BLOCK_LEN, Arrival
from pagedjax.core.errors import ConfigError

# English words that are one token each, with their leading space, in the usual byte-pair vocabularies: every engine
# gets the same text and counts about the same tokens.
WORDS = tuple(
    """the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were all her she there would their we him been has when who will no more if out so said what up its about
    than into them can only other time new some could these two may first then do any like my now over such our man me
    even most made after also did many before must through years where much your way well down should because each just
    those people how too little state good very make world still own see men work long here get both between life being
    under never day same another know while last might us great old year off come since against go came right used take
    three""".split()  # noqa: SIM905 - a list of literals would run over thirty lines
)
# Ids below are special or byte tokens in most vocabularies; most vocabularies have as many.
DEFAULT_IDS = range(1_000, 30_000)

Symbols = Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths in tokens, drawn uniformly from low..high, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"length range {self.low}:{self.high} must satisfy 1 <= low <= high")

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send `due_s` seconds after the run's start. Words of a text prompt count as tokens."""

    due_s: float
    prompt: str | tuple[int, ...]
    prompt_len: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """A synthetic workload. `request_rate` is in requests/s; infinity sends all at once.

    Gaps follow a gamma distribution of shape `burstiness` and mean 1 / `request_rate`, as in vLLM: 1 is a Poisson
    process, less is burstier, more is steadier. `prefix_len` tokens are common to all requests of one of
    `num_prefixes` groups, in turn, and come before `input_len` tokens of the request's own. Raises ConfigError.
    """

    num_prompts: int
    input_len: LengthRange
    output_len: LengthRange
    prefix_len: int = 0
    num_prefixes: int = 1
    request_rate: float = math.inf
    burstiness: float = 1.0
    symbols: Symbols = WORDS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts must be at least 1, not {self.num_prompts}")
        if self.prefix_len < 0:
            raise ConfigError(f"--prefix-len must not be negative, got {self.prefix_len}")
        if self.num_prefixes < 1:
            raise ConfigError(f"--num-prefixes must be at least 1, not {self.num_prefixes}")
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate must be above 0 (inf sends all at once), not {self.request_rate}")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"--burstiness must be a finite number above 0, not {self.burstiness}")


def synthetic(config: WorkloadConfig) -> tuple[BenchRequest, ...]:
    """Random prompts, with shared prefixes where the configuration asks for them."""
    lengths, prompts = _random(config.seed, "lengths"), _random(config.seed, "prompts")
    prefixes = [_draw(prompts, config.symbols, config.prefix_len) for _ in range(config.num_prefixes)]
    due_s = arrival_times(config.num_prompts, config.request_rate, config.burstiness, config.seed)
    requests = []
    for index, due in enumerate(due_s):
        input_len, output_len = config.input_len.draw(lengths), config.output_len.draw(lengths)
        tokens = prefixes[index % config.num_prefixes] + _draw(prompts, config.symbols, input_len)
        requests.append(_request(due, tokens, output_len))
    return tuple(requests)


def arrival_times(num: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start to each arrival, rising; all 0 for an infinite rate."""
    if math.isinf(request_rate):
        return [0.0] * num
    random = _random(seed, "arrivals")
    gaps = (random.gammavariate(burstiness, 1.0 / (request_rate * burstiness)) for _ in range(num))
    return list(accumulate(gaps))


def replay(
    arrivals: Sequence[Arrival],
    *,
    symbols: Symbols = WORDS,
    seed: int = 0,
    time_scale: float = 1.0,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
) -> tuple[BenchRequest, ...]:
    """A recorded trace with made-up prompts of its lengths, cut to the maxima where given.

    Times are multiplied by `time_scale` (0 sends all at once). Where the trace tells blocks by hash id, equal ids
    become equal tokens, so prefixes are shared as they were.
    """
    if not 0 <= time_scale < math.inf:
        raise ConfigError(f"--time-scale must be a finite number of at least 0, not {time_scale}")
    requests = []
    for index, arrival in enumerate(arrivals):
        input_len = min(arrival.input_len, max_input_len or arrival.input_len)
        output_len = min(arrival.output_len, max_output_len or arrival.output_len)
        tokens = _trace_tokens(arrival, index, input_len, symbols, seed)
        requests.append(_request(arrival.time_s * time_scale, tokens, output_len))
    return tuple(requests)


def _trace_tokens(arrival: Arrival, index: int, input_len: int, symbols: Symbols, seed: int) -> list[Any]:
    if arrival.hash_ids is None:
        return _draw(_random(seed, f"trace-{index}"), symbols, input_len)
    tokens: list[Any] = []
    for hash_id in arrival.hash_ids[: -(-input_len // MOONCAKE_BLOCK_LEN)]:
        tokens += _draw(_random(seed, f"block-{hash_id}"), symbols, MOONCAKE_BLOCK_LEN)
    return tokens[:input_len]


def _request(due_s: float, tokens: list[Any], output_len: int) -> BenchRequest:
    prompt = " ".join(tokens) if isinstance(tokens[0], str) else tuple(tokens)
    return BenchRequest(due_s, prompt, len(tokens), output_len)


def _draw(random: Random, symbols: Symbols, num: int) -> list[Any]:
    return random.choices(symbols, k=num)


def _random(seed: int, purpose: str) -> Random:
    return Random(f"{seed}-{purpose}")
