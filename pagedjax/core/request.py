"""What a caller asks for, and the part of it that the scheduler sees."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from pagedjax.core.errors import RequestError
from pagedjax.core.structure import StructuredOutputsParams
from pagedjax.core.tenants import DEFAULT_TENANT

MAX_N = 128
MAX_LOGPROBS = 20
# Of each beam the MAX_LOGPROBS likeliest tokens are known; half of them may end it.
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LOGIT_BIAS = 300
MIN_PRIORITY, MAX_PRIORITY = -8, 7


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request(NamedTuple):
    """What the scheduler knows of one sequence: lengths in tokens, no token ids, no text.

    A lower `priority` is served earlier (vLLM's convention); it lies in -8..7. `fork_of` is a sequence with the same
    prompt, whose blocks this one shares if that one, or another fork of it, still runs (parallel sampling).
    `needs_confirmation` says that the next step needs the last token's value on the host (beams), so it is planned only
    once that token is confirmed. `tenant` names whose account pays. One that is not `preemptible` runs from its first
    step to its last: it is admitted once there is room for its prompt and `max_tokens`.
    """

    sequence_id: int
    prompt_len: int
    max_tokens: int
    priority: int = 0
    fork_of: int | None = None
    needs_confirmation: bool = False
    tenant: str = DEFAULT_TENANT
    preemptible: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Names, defaults and meanings are vLLM's.

    `top_k` of 0 or -1 and `top_p` of 1 keep every token; `temperature` of 0 is greedy. `logprobs` is the
    number of alternatives reported beside each sampled token (0: the sampled one only), `prompt_logprobs`
    likewise for the prompt. `max_tokens=None` means up to the model's context. Of `best_of` samples (`n` unless given)
    the `n` with the highest log-probability per token come out, the best first, once all have ended. With
    `structured_outputs` the output has that shape, and ends where nothing may follow.

    With `beam_width` that many beams are searched, and all come out (`n` is then `beam_width`), the best first: by
    log-probability / length ** `length_penalty`, the length in tokens of output. The search ends once no running beam
    can still come before those that have ended; with `early_stopping` as soon as `beam_width` have. It goes by the
    model's own distribution, so what would change that is refused.

    Raises RequestError, with the field's name, for a value out of range.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _entries(self, "stop")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _entries(self, "stop_token_ids"))
        if not isinstance(self.logit_bias, Mapping | None):
            raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias) if self.logit_bias else None)
        _check_numbers(self)
        _check_beams(self)
        _check_stops(self)
        _check_logit_bias(self)

    @property
    def num_samples(self) -> int:
        """How many sequences are generated."""
        return self.n if self.best_of is None else self.best_of


class Logprob(NamedTuple):
    """One candidate token: its natural-log probability, its rank (1 = likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence, in the shape of vLLM's class of that name.

    `logprobs` holds one dict a token: token id -> Logprob, the sampled token always among them.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One request's result, in the shape of vLLM's class of that name."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0


def _entries(params: SamplingParams, name: str) -> tuple[Any, ...]:
    value = getattr(params, name)
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list, not {type(value).__name__}", param=name)
    return tuple(value)


def _check_numbers(params: SamplingParams) -> None:
    _integer(params, "n", 1, MAX_N)
    _integer(params, "best_of", 1, MAX_N, optional=True)
    if params.num_samples < params.n:
        message = f"best_of must be at least n, which is {params.n}, not {params.best_of}"
        raise RequestError(message, param="best_of")
    _integer(params, "beam_width", 1, MAX_BEAM_WIDTH, optional=True)
    _number(params, "length_penalty", -10.0, 10.0)
    _number(params, "temperature", 0.0, 2.0)
    _number(params, "top_p", 0.0, 1.0, above=True)
    _integer(params, "top_k", -1, None)
    _number(params, "min_p", 0.0, 1.0)
    _integer(params, "seed", -(2**63), 2**64 - 1, optional=True)
    _number(params, "repetition_penalty", 0.0, 10.0, above=True)
    _number(params, "presence_penalty", -2.0, 2.0)
    _number(params, "frequency_penalty", -2.0, 2.0)
    _integer(params, "max_tokens", 1, None, optional=True)
    _integer(params, "min_tokens", 0, None)
    _integer(params, "logprobs", 0, MAX_LOGPROBS, optional=True)
    _integer(params, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "early_stopping"):
        if not isinstance(getattr(params, name), bool):
            raise RequestError(f"{name} must be true or false", param=name)
    if not isinstance(params.structured_outputs, StructuredOutputsParams | None):
        raise RequestError("structured_outputs must be StructuredOutputsParams", param="structured_outputs")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError("min_tokens must not exceed max_tokens", param="min_tokens")


def _check_beams(params: SamplingParams) -> None:
    if params.beam_width is None:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(params, name) != neutral:
                raise RequestError(f"{name} is for beam search only", param=name)
        return
    for name, neutrals in _NEUTRAL_FOR_BEAMS.items():
        if getattr(params, name) not in neutrals:
            raise RequestError(f"{name} {getattr(params, name)!r} cannot be combined with beam search", param=name)
    if params.n not in (1, params.beam_width):
        raise RequestError(f"n {params.n} must be the beam width, {params.beam_width}", param="n")
    object.__setattr__(params, "n", params.beam_width)


# What leaves the model's distribution as it is. (A temperature of 0 is what others ask for with beam search.)
_NEUTRAL_FOR_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None,),
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": (None,),
    "structured_outputs": (None,),
}


def _check_stops(params: SamplingParams) -> None:
    stop, stop_token_ids = tuple(params.stop or ()), tuple(params.stop_token_ids or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop holds {len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for text in stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
            raise RequestError(f"stop strings must have 1 to {MAX_STOP_STRING_CHARS} characters", param="stop")
    for token_id in stop_token_ids:
        if not _is_int(token_id) or token_id < 0:
            raise RequestError("stop_token_ids must be token ids", param="stop_token_ids")


def _check_logit_bias(params: SamplingParams) -> None:
    bias = params.logit_bias or {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(bias)} entries; the most is {MAX_LOGIT_BIAS}", param="logit_bias")
    for token_id, value in bias.items():
        if not _is_int(token_id) or token_id < 0:
            raise RequestError(f"logit_bias key {token_id!r} is not a token id", param="logit_bias")
        if not _is_number(value) or not -100 <= value <= 100:
            raise RequestError(f"logit_bias[{token_id}] must lie in -100..100", param="logit_bias")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # Compared, not `math.isfinite`, which overflows for an integer beyond the floats.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _integer(params: SamplingParams, name: str, low: int, high: int | None, *, optional: bool = False) -> None:
    value = getattr(params, name)
    if optional and value is None:
        return
    if not _is_int(value) or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be an integer {bound}, not {value!r}", param=name)


def _number(params: SamplingParams, name: str, low: float, high: float, *, above: bool = False) -> None:
    value = getattr(params, name)
    if not _is_number(value) or not (low < value if above else low <= value) or value > high:
        bound = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be a number {bound}, not {value!r}", param=name)
