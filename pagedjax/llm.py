"""Offline inference: prompts in, results out, in the shape of vLLM's class of that name.

from pagedjax import LLM, SamplingParams
llm = LLM(model="smollm2-135m")
print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

import dataclasses
import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from operator import index
from types import FrameType
from typing import Any

from tqdm import tqdm

from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.core.request import RequestOutput, SamplingParams
from pagedjax.engine.build import build_engine
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.engine import Engine
from pagedjax.engine.outputs import add_update, empty_output
from pagedjax.engine.submission import Submission, within_room
from pagedjax.engine.tokenizer import Tokenizer
from pagedjax.weights.store import ProgressBar

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


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
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete each prompt: a string, a list of token ids, or vLLM's {"prompt": …} or {"prompt_token_ids": …}.

        `sampling_params` and `priority` are for all prompts, or one each. Results are in the prompts' order. As in
        vLLM, output ends where the context does, whatever `max_tokens`. Raises RequestError, and runs nothing, if any
        request is out of bounds, and EngineError if the model gives logits that are not finite.
        """
        many = _prompts(prompts)
        params = _one_each("sampling_params", sampling_params or SamplingParams(), len(many))
        priorities = _one_each("priority", priority, len(many))
        requests = [
            self.engine.prepare(prompt, p, request_id=str(next(self._ids)), priority=rank)
            for prompt, p, rank in zip(many, params, priorities, strict=True)
        ]
        scheduler = self.engine.state.config
        return self._run([within_room(request, scheduler) for request in requests], use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer each conversation: a list of {"role": …, "content": …}, or a list of such lists."""
        many: Sequence[Messages] = [messages] if messages and isinstance(messages[0], Mapping) else messages  # type: ignore[list-item, assignment]
        tokenizer = self.get_tokenizer()
        texts = [
            tokenizer.apply_chat_template(list(each), add_generation_prompt=add_generation_prompt) for each in many
        ]
        # The template writes the special tokens itself.
        token_ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        outputs = self.generate(token_ids, sampling_params, use_tqdm=use_tqdm)
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
    return EngineConfig(model=model, **{**unlimited, **options})


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [_prompt(prompts)]  # type: ignore[arg-type]
    return [_prompt(prompt) for prompt in prompts]  # type: ignore[arg-type]


def _prompt(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, Mapping):
        fields = set(prompt) & {"prompt", "prompt_token_ids"}
        if len(fields) != 1 or len(prompt) != 1:
            raise RequestError("a prompt given as a dict has either prompt or prompt_token_ids", param="prompt")
        prompt = prompt[fields.pop()]
    if isinstance(prompt, str):
        return prompt
    refused = RequestError("a prompt is a string or a list of token ids", param="prompt")
    if isinstance(prompt, bytes | bytearray):
        # Their items are integers too, but nobody means token ids by them.
        raise refused
    try:
        return [index(token_id) for token_id in prompt]
    except TypeError:
        raise refused from None


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts", param=name)
    return list(value)
