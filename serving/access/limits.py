"""Rate limits: requests and tokens a minute, a bucket each for every key.

A bucket holds a minute's worth and fills evenly. A request takes one request at its start, its prompt's tokens when
they are known, and what it generated when it ends; so a bucket may go below zero, and then nothing starts until it has
filled again.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedjax.core.errors import RequestError
from serving.access.keys import ApiKey


@dataclass(slots=True)
class Bucket:
    """What is `left` of `per_minute`, as of `since_s`."""

    per_minute: int
    left: float
    since_s: float

    def refill(self, now_s: float) -> None:
        gained = (now_s - self.since_s) * self.per_minute / 60
        self.left, self.since_s = min(self.per_minute, self.left + gained), now_s

    def seconds_until(self, amount: float) -> float:
        return max(0.0, (amount - self.left) * 60 / self.per_minute)


class Limits:
    """The buckets of all keys. Belongs to the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[bytes, str], Bucket] = {}

    def keep(self, keys: Sequence[ApiKey]) -> None:
        """Forget the buckets of keys that are gone."""
        digests = {key.digest for key in keys}
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name[0] in digests}

    def take_request(self, key: ApiKey) -> None:
        """Raises RequestError rate_limit_exceeded where the minute's requests or tokens are used up."""
        tokens = self._bucket(key, "tokens")
        if tokens is not None and tokens.left <= 0:
            raise _exceeded(key, "tokens", tokens, 1)
        self._take(key, "requests", 1)

    def take_prompt(self, key: ApiKey, num_tokens: int) -> None:
        """Raises RequestError rate_limit_exceeded, and a 400 for a prompt that no minute has room for."""
        most = key.tokens_per_minute
        if most is not None and num_tokens > most:
            message = f"the request has {num_tokens} prompt tokens, and your key allows {most} a minute"
            raise RequestError(message, param="prompt", code="prompt_exceeds_rate_limit")
        self._take(key, "tokens", num_tokens)

    def charge_output(self, key: ApiKey, num_tokens: int) -> None:
        bucket = self._bucket(key, "tokens")
        if bucket is not None:
            bucket.left -= num_tokens

    def headers(self, key: ApiKey) -> dict[str, str]:
        """OpenAI's x-ratelimit-* headers for what the key limits."""
        found: dict[str, str] = {}
        for what in ("requests", "tokens"):
            bucket = self._bucket(key, what)
            if bucket is not None:
                found[f"x-ratelimit-limit-{what}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.left)))
                found[f"x-ratelimit-reset-{what}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return found

    def seconds_until_allowed(self, key: ApiKey, num_tokens: int = 1) -> int:
        """Whole seconds, at least one, after which the key has a request and `num_tokens` again: for Retry-After."""
        waits = [1.0]
        for what, amount in (("requests", 1), ("tokens", num_tokens)):
            bucket = self._bucket(key, what)
            if bucket is not None:
                waits.append(bucket.seconds_until(amount))
        return math.ceil(max(waits))

    def _take(self, key: ApiKey, what: str, amount: int) -> None:
        bucket = self._bucket(key, what)
        if bucket is None:
            return
        if bucket.left < amount:
            raise _exceeded(key, what, bucket, amount)
        bucket.left -= amount

    def _bucket(self, key: ApiKey, what: str) -> Bucket | None:
        per_minute = key.requests_per_minute if what == "requests" else key.tokens_per_minute
        if per_minute is None:
            return None
        now_s, name = self._clock(), (key.digest, what)
        bucket = self._buckets.get(name)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[name] = Bucket(per_minute, per_minute, now_s)
        bucket.refill(now_s)
        return bucket


def _exceeded(key: ApiKey, what: str, bucket: Bucket, amount: int) -> RequestError:
    wait_s = math.ceil(max(1.0, bucket.seconds_until(amount)))
    message = f"your key allows {bucket.per_minute} {what} a minute; try again in {wait_s} s"
    return RequestError(message, code="rate_limit_exceeded")
