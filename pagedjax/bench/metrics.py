"""From what the client saw to the figures of the report: pure arithmetic on records.

TTFT is the time from sending to the first chunk that carries text. ITL is the gap between successive text chunks of a
request, divided evenly over the tokens of the later one where the server sends several at once. TPOT is
(last chunk - first chunk) / (output tokens - 1). E2E runs from sending to the end of the response.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from pagedjax.simulator.report import Summary, summarise


class Status(StrEnum):
    OK = "ok"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Chunk(NamedTuple):
    """Text that arrived `time_s` seconds after the run's start. `num_tokens` is None where the server tells none."""

    time_s: float
    text_len: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request. Times are in seconds since the run's start; lengths in tokens.

    The request was due at `due_s` and sent at `start_s`: later where the concurrency limit or a busy client held it.
    `output_len` is the server's count, or the client's where the server tells none.
    """

    due_s: float
    start_s: float
    end_s: float
    chunks: tuple[Chunk, ...]
    prompt_len: int
    output_len: int
    cached_len: int | None = None
    finish_reason: str | None = None
    status: Status = Status.OK
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunks[0].time_s - self.start_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """None for a single token, which has no gap."""
        if self.output_len < 2:
            return None
        return (self.chunks[-1].time_s - self.chunks[0].time_s) / (self.output_len - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in milliseconds. `itl` bounds the 99th percentile of a request's own gaps."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """One run against a server. Only requests with status ok count, except in the counts of the others.

    `send_delay_ms` is how late requests left after they were due: large values say that the concurrency limit or the
    client, not the arrival process, set the load.
    """

    num_ok: int
    num_failed: int
    num_interrupted: int
    errors: tuple[tuple[str, int], ...]
    wall_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_requests_per_s: float | None
    tokens_per_chunk: float | None
    max_running: int
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    e2e_ms: Summary | None
    send_delay_ms: Summary | None


def serve_figures(records: Sequence[RequestRecord], wall_s: float, slo: Slo | None = None) -> ServeFigures:
    """Sum up the records of a run that took `wall_s` seconds."""
    done = [record for record in records if record.status is Status.OK]
    input_tokens = sum(record.prompt_len for record in done)
    output_tokens = sum(record.output_len for record in done)
    num_chunks = sum(len(record.chunks) for record in done)
    errors = Counter(record.error or "unknown" for record in records if record.status is Status.FAILED)
    return ServeFigures(
        num_ok=len(done),
        num_failed=sum(errors.values()),
        num_interrupted=sum(record.status is Status.INTERRUPTED for record in records),
        errors=tuple(errors.most_common()),
        wall_s=wall_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=_cached_tokens(done),
        requests_per_s=len(done) / wall_s,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(input_tokens + output_tokens) / wall_s,
        goodput_requests_per_s=None if slo is None else sum(meets(record, slo) for record in done) / wall_s,
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else None,
        max_running=max((num for _, num, _ in timeline(records)), default=0),
        ttft_ms=summarise_ms(record.ttft_s for record in done),
        tpot_ms=summarise_ms(record.tpot_s for record in done if record.tpot_s is not None),
        itl_ms=summarise_ms(gap for record in done for gap in token_gaps_s(record)),
        e2e_ms=summarise_ms(record.e2e_s for record in done),
        send_delay_ms=summarise_ms(max(0.0, record.start_s - record.due_s) for record in done),
    )


def summarise_ms(values_s: Iterable[float]) -> Summary | None:
    """Seconds in, milliseconds out."""
    return summarise(value * 1e3 for value in values_s)


def token_gaps_s(record: RequestRecord) -> list[float]:
    """Seconds before each token after the first chunk; the tokens of one chunk share its gap evenly."""
    counts = chunk_token_counts(record)
    gaps: list[float] = []
    for (before, chunk), count in zip(pairwise(record.chunks), counts[1:]):
        gaps += [(chunk.time_s - before.time_s) / count] * count
    return gaps


def chunk_token_counts(record: RequestRecord) -> list[int]:
    """Tokens of each chunk, at least one each: the server's own counts, or `output_len` spread by text length."""
    told = [chunk.num_tokens for chunk in record.chunks]
    if all(count is not None for count in told):
        return [max(1, count) for count in told if count is not None]
    return spread(record.output_len, [chunk.text_len for chunk in record.chunks])


def spread(num_tokens: int, text_lens: Sequence[int]) -> list[int]:
    """Split `num_tokens` over chunks, one each and the rest in proportion to their text (largest remainders).

    >>> spread(6, [5, 5, 20])
    [1, 1, 4]
    """
    surplus = max(0, num_tokens - len(text_lens))
    total = sum(text_lens)
    if not surplus or not total:
        return [1] * len(text_lens)
    # A chunk of average text per token already has its one token; what is longer gets the surplus.
    over = [max(0.0, text_len - total / num_tokens) for text_len in text_lens]
    shares = [surplus * part / sum(over) for part in over]
    counts = [1 + int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: int(shares[index]) - shares[index])
    for index in by_remainder[: num_tokens - sum(counts)]:
        counts[index] += 1
    return counts


def meets(record: RequestRecord, slo: Slo) -> bool:
    """Whether one finished request kept every bound that is set."""
    gaps = summarise(token_gaps_s(record)) if slo.itl is not None else None
    seen_s = (
        (slo.ttft, record.ttft_s),
        (slo.tpot, record.tpot_s),
        (slo.itl, gaps.p99 if gaps else None),
        (slo.e2e, record.e2e_s),
    )
    return all(bound is None or value is None or value * 1e3 <= bound for bound, value in seen_s)


def timeline(records: Sequence[RequestRecord]) -> list[tuple[float, int, int]]:
    """(time_s, requests in flight, of these those that have had their first token), at each change."""
    changes = []
    for record in records:
        changes += [(record.start_s, 1, 0), (record.end_s, -1, -1 if record.chunks else 0)]
        changes += [(record.chunks[0].time_s, 0, 1)] if record.chunks else []
    points, running, decoding = [], 0, 0
    for time_s, more_running, more_decoding in sorted(changes):
        running, decoding = running + more_running, decoding + more_decoding
        points.append((time_s, running, decoding))
    return points


def _cached_tokens(records: Sequence[RequestRecord]) -> int | None:
    told = [record.cached_len for record in records if record.cached_len is not None]
    return sum(told) if told else None
