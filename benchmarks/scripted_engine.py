"""An engine that computes nothing, for measuring what is around it: tokens fall due at fixed times.

All streams get a token at each tick, as from a step of a batch. The text of a stream's first token is the seconds that
the engine itself took for it, so that a client can tell what the rest of the way cost.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.request import SamplingParams
from pagedjax.core.scheduler import init
from pagedjax.core.state import State
from pagedjax.engine.lives import LifeStory
from pagedjax.engine.load import Load, load_of
from pagedjax.engine.outputs import Delta, Update
from pagedjax.engine.step_history import StepRecord
from pagedjax.engine.stream import Stream, feed_all
from pagedjax.engine.submission import Submission, submission

T = TypeVar("T")
SCHEDULER = SchedulerConfig(num_blocks=65_536, max_model_len=8192, max_num_batched_tokens=8192)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    vocab_size = 256
    special_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    chat_template_text = ""

    def encode(self, text: str, add_special_tokens: bool = True, *, max_len: int | None = None) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **_options: Any) -> str:
        return "\n".join(message["content"] for message in messages)


class ScriptedEngine:
    """`serving.interfaces.Engine`, with a step every `step_s`, on the server's own event loop."""

    model_name, max_model_len, created = "scripted", SCHEDULER.max_model_len, 0

    def __init__(self, step_s: float) -> None:
        self.tokenizer = Bytes()
        self._step_s = step_s
        self._state = init(SCHEDULER)
        self._open: dict[Stream, tuple[Submission, float, int]] = {}
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    def prepare(self, prompt: str | list[int], params: SamplingParams, **options: Any) -> Submission:
        return submission(self.tokenizer, SCHEDULER, prompt, params, **options)  # type: ignore[arg-type]

    def submit_all(self, requests: Sequence[Submission]) -> list[Stream]:
        streams = [Stream(request, self._drop) for request in requests]
        now_s = time.perf_counter()
        self._open |= {stream: (request, now_s, 0) for stream, request in zip(streams, requests)}
        return streams

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            fed = []
            for stream, (request, began_s, sent) in self._open.items():
                text = f"{time.perf_counter() - began_s:.6f}" if sent == 0 else " word"
                is_last = sent + 1 == request.params.max_tokens
                delta = Delta(0, text, (65,), finish_reason="length" if is_last else None)
                self._open[stream] = request, began_s, sent + 1
                fed.append((stream, Update(stream.request_id, delta)))
            for ended in feed_all(fed):
                del self._open[ended]

    def _drop(self, stream: Stream, outcome: str) -> None:
        self._open.pop(stream, None)

    def load(self) -> Load:
        return load_of(self._state)

    async def ask(self, question: Callable[[State], T]) -> T:
        return question(self._state)

    async def lives(self, request_id: str) -> list[LifeStory]:
        return []

    async def steps(self, since: int, limit: int) -> list[StepRecord]:
        return []

    async def profile(self, directory: str, duration_s: float) -> None: ...

    async def render_metrics(self) -> bytes:
        return b""

    async def set_log_level(self, level: str) -> None: ...

    def dump_stacks(self) -> None: ...

    def drain(self) -> None: ...

    def is_ready(self) -> bool:
        return True

    def is_full(self) -> bool:
        return False

    def is_alive(self) -> bool:
        return True

    def step_age_s(self) -> float:
        return 0.0
