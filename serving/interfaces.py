"""What serving needs of an engine: the shape of `pagedjax.engine.async_engine.AsyncEngine` and of the tests' fake."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from prometheus_client import CollectorRegistry

from pagedjax.core.request import Logprob, SamplingParams
from pagedjax.core.state import State
from pagedjax.core.tenants import DEFAULT_TENANT

if TYPE_CHECKING:
    from pagedjax.engine.async_engine import AsyncEngine
    from pagedjax.engine.submission import Submission

TokenLogprobs = Mapping[int, Logprob]


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def special_token_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, add_special_tokens: bool = True, *, max_len: int | None = None) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    @property
    def chat_template_text(self) -> str: ...
    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str: ...


class Delta(Protocol):
    """What one sequence of a stream gained in one step. `logprobs` has one entry a token where they were asked for."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprobs] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...


class Stream(Protocol):
    """The `n` sequences of one prompt. Iteration ends when all have finished, and raises what went wrong.

    `num_cached_tokens` and `prompt_logprobs` are complete once the first delta is out.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs | None] | None: ...
    @property
    def embedding(self) -> np.ndarray | None: ...
    def __aiter__(self) -> AsyncIterator[Delta]: ...
    def abort(self) -> None: ...


class Metrics(Protocol):
    @property
    def registry(self) -> CollectorRegistry: ...


class Engine(Protocol):
    """`prepare` is safe on any thread.

    `submit_all` takes all or none: RequestError at once for what can never run, and when it is full or draining.
    """

    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def created(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def metrics(self) -> Metrics: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        preemptible: bool = True,
        cache_salt: str = "",
        pooling: Literal["last", "mean"] | None = None,
    ) -> "Submission": ...
    def submit_all(self, requests: "Sequence[Submission]") -> Sequence[Stream]: ...
    def state(self) -> State: ...
    def is_ready(self) -> bool: ...
    def is_full(self) -> bool: ...
    def is_alive(self) -> bool: ...
    def drain(self) -> None: ...


if TYPE_CHECKING:

    def _fits(engine: AsyncEngine) -> Engine:
        """Checked by the type checker: the engine has this shape."""
        return engine
