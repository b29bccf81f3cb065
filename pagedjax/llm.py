"""Offline inference: prompts in, results out, in the shape of vLLM's class of that name.

from pagedjax import LLM, SamplingParams
llm = LLM(model="smollm2-135m")
print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

import dataclasses
import itertools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tqdm import tqdm

from pagedjax.core.errors import ConfigError
from pagedjax.core.request import RequestOutput, SamplingParams
from pagedjax.core.tenants import DEFAULT_TENANT
from pagedjax.engine.build import build_engine
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.engine import Engine
from pagedjax.engine.inputs import Messages, Prompt, each_conversation, each_prompt, one_each
from pagedjax.engine.outputs import add_update, empty_output
from pagedjax.engine.submission import Submission, within_room
from pagedjax.engine.tokenizer import Tokenizer
from pagedjax.weights.store import ProgressBar


class LLM:
    """A model in this process. Keywords are EngineConfig's fields. Use it from one thread.

    Raises ConfigError for unknown keywords, and for a model that cannot be found, loaded or held in memory.
    """

    def __init__(self, model: str = "smollm2-135m", *, show_progress_bars: bool = True, **options: Any) -> None:
        self._ids = itertools.count()
        config = make_config(model, options)
        with ProgressBar(config.name) as bar:
            self.engine: Engine = build_engine(config, bar if show_progress_bars else None)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Iterable[int] = 0,
        tenant: str | Iterable[str] = DEFAULT_TENANT,
        preemptible: bool | Iterable[bool] = True,
    ) -> list[RequestOutput]:
        """Complete each prompt: a string, token ids, or vLLM's {"prompt": …} or {"prompt_token_ids": …}.

        Any iterables serve as lists, and arrays of integers; no prompts give no results. `sampling_params`,
        `priority`, `tenant` (whose share pays) and `preemptible` (False: from its first step to its last without a
        break) are for all prompts, or one each. Results are in the prompts' order. As in vLLM, output ends where
        the context does, whatever `max_tokens`. Raises RequestError, and runs nothing, if any request is out of
        bounds or no prompt at all, and EngineError if the model gives logits that are not finite.
        """
        many = each_prompt(prompts)
        one = SamplingParams() if sampling_params is None else sampling_params
        params = one_each("sampling_params", one, SamplingParams, len(many))
        priorities = one_each("priority", priority, int, len(many))
        tenants = one_each("tenant", tenant, str, len(many))
        breaks = one_each("preemptible", preemptible, bool, len(many))
        requests = [
            self.engine.prepare(
                prompt, p, request_id=str(next(self._ids)), priority=rank, tenant=name, preemptible=may_break
            )
            for prompt, p, rank, name, may_break in zip(many, params, priorities, tenants, breaks, strict=True)
        ]
        scheduler = self.engine.state.config
        return self._run([within_room(request, scheduler) for request in requests], use_tqdm)

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        priority: int | Iterable[int] = 0,
        tenant: str | Iterable[str] = DEFAULT_TENANT,
        preemptible: bool | Iterable[bool] = True,
    ) -> list[RequestOutput]:
        """Answer each conversation: a list of {"role": …, "content": …}, or a list of such lists. The rest is as in
        `generate`."""
        tokenizer = self.get_tokenizer()
        texts = [
            tokenizer.apply_chat_template(each, add_generation_prompt=add_generation_prompt)
            for each in each_conversation(messages)
        ]
        # The template writes the special tokens itself.
        max_len = self.engine.state.config.max_model_len
        token_ids = [tokenizer.encode(text, add_special_tokens=False, max_len=max_len) for text in texts]
        outputs = self.generate(
            token_ids, sampling_params, use_tqdm=use_tqdm, priority=priority, tenant=tenant, preemptible=preemptible
        )
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def _run(self, requests: list[Submission], use_tqdm: bool) -> list[RequestOutput]:
        outputs = {request.request_id: empty_output(request) for request in requests}
        self.engine.check(requests)
        with _interrupts_held() as let_interrupt:
            try:
                for request in requests:
                    self.engine.add(request)
                # Without `disable` the environment's TQDM_DISABLE counts.
                quiet = {} if use_tqdm else {"disable": True}
                with tqdm(total=len(requests), desc="requests", unit=" requests", **quiet) as bar:
                    while self.engine.has_work:
                        for update in self.engine.step():
                            output = outputs[update.request_id]
                            add_update(output, update)
                            bar.update(output.finished)
                        let_interrupt()
            finally:
                self.engine.abort_all()
        return list(outputs.values())


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the function given is called, or to the end: a step broken off halfway ends the engine.

    The third in a row goes through at once, for a device that hangs. Only the main thread gets signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    held: list[tuple[int, FrameType | None]] = []

    def let_through() -> None:
        if held:
            number, frame = held[-1]
            held.clear()
            handler(number, frame)

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 2:
            let_through()

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, handler)
        let_through()


def make_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from keywords. A queue's limits protect a server; here the caller waits for all of it."""
    known = {f.name for f in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    unlimited = {"max_queued_requests": 2**62, "max_queued_tokens": 2**62}
    weights = options.get("tenant_weights")
    if isinstance(weights, Mapping):
        options = {**options, "tenant_weights": ",".join(f"{name}={weight}" for name, weight in weights.items())}
    return EngineConfig(model=model, **{**unlimited, **options})
