"""What the two generating endpoints accept: pure parsing from a JSON value to a call. See `request_fields` too."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagedjax.core.errors import RequestError
from pagedjax.core.request import MAX_BEAM_WIDTH, MAX_LOGPROBS, SamplingParams
from serving.requests import fields, shapes
from serving.requests.fields import Check, known_fields, record, required
from serving.requests.inputs import ModelFacts, Prompt, check_ids, read_messages, read_prompts
from serving.requests.request_fields import CHAT, COMPLETION, SAMPLING
from serving.tools.tools import ToolChoice, callable_tools

MAX_CHOICES = 1024
MAX_KWARG_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingCall:
    """What completions and chats have in common. `params` may ask the engine for more log-probabilities than `logprobs`
    and `prompt_logprobs`, the numbers of alternatives to show, or None. With `continuous_usage` every chunk tells the
    usage so far."""

    params: SamplingParams
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    priority: int = 0
    preemptible: bool = True
    cache_salt: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall(GeneratingCall):
    """`score_only` is `max_tokens: 0` with echo: the prompt is scored, and the one token that the engine must make is
    not shown."""

    prompts: tuple[Prompt, ...]
    echo: bool = False
    score_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(GeneratingCall):
    """`messages` hold role, content and where given name, tool_calls and tool_call_id, as chat templates expect them.
    `tools` are those that may be called."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def parse_completion(body: Any, model: ModelFacts) -> CompletionCall:
    """Raises RequestError naming the field."""
    given = _checked(body, COMPLETION, model)
    prompts = read_prompts(required(given, "prompt"), model)
    echo = given.get("echo", False)
    logprobs, prompt_logprobs = given.get("logprobs"), given.get("prompt_logprobs")
    score_only = echo and given.get("max_tokens") == 0
    sampling = _sampling(given) | {"logprobs": logprobs}
    sampling["best_of"] = given.get("best_of")
    if score_only:
        sampling |= {"max_tokens": 1, "min_tokens": 0}
    params = SamplingParams(**sampling, structured_outputs=shapes.wish(given))
    if echo and logprobs is not None:
        params = replace(params, prompt_logprobs=max(logprobs, prompt_logprobs or 0))
    if params.num_samples > params.n and given.get("stream"):
        raise RequestError("best_of above n can't be streamed", param="best_of")
    _check_num_choices(params, len(prompts))
    shown = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "echo": echo, "score_only": score_only}
    return CompletionCall(prompts=prompts, params=params, **shown, **_delivery(given))


def parse_chat(body: Any, model: ModelFacts) -> ChatCall:
    """Raises RequestError naming the field."""
    given = _checked(body, CHAT, model)
    messages = read_messages(required(given, "messages"), model)
    sampling = _sampling(given)
    sampling["max_tokens"] = given.get("max_completion_tokens", given.get("max_tokens"))
    logprobs = _top_logprobs(given)
    chat_tools, choice, shape = callable_tools(given, shapes.wish(given))
    params = SamplingParams(**sampling, logprobs=logprobs, structured_outputs=shape)
    return ChatCall(
        messages=messages,
        params=params,
        logprobs=logprobs,
        prompt_logprobs=given.get("prompt_logprobs"),
        tools=chat_tools,
        tool_choice=choice,
        **_template(given, messages, model),
        **_delivery(given),
    )


def _checked(body: Any, table: Mapping[str, Check], model: ModelFacts) -> dict[str, Any]:
    given = known_fields(record(body, fields.BODY), table, lenient=model.options.lenient)
    check_model(given, model)
    if "stream_options" in given and not given.get("stream"):
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if "prompt_logprobs" in given and given.get("stream"):
        raise RequestError("prompt_logprobs can't be streamed", param="prompt_logprobs")
    for name in ("logit_bias", "stop_token_ids"):
        check_ids(given.get(name, ()), name, model)
    return given


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams' fields. `use_beam_search` makes of `n` the number of beams, as in vLLM."""
    sampling = {name: given[name] for name in SAMPLING if name in given}
    if given.get("use_beam_search"):
        if given.get("stream"):
            raise RequestError("use_beam_search can't be streamed", param="stream")
        if not 1 <= given.get("n", 1) <= MAX_BEAM_WIDTH:
            message = f"n must lie in 1..{MAX_BEAM_WIDTH} with use_beam_search, not {given['n']}"
            raise RequestError(message, param="n")
        if not given.get("preemptible", True):
            raise RequestError("preemptible false cannot be combined with use_beam_search", param="preemptible")
        sampling["beam_width"] = given.get("n", 1)
    return sampling


def check_model(given: Mapping[str, Any], model: ModelFacts) -> None:
    """The model must be named, and be the one that is served."""
    name = required(given, "model")
    if name != model.name:
        message = f"the model {name[:100]!r} does not exist; this server has {model.name!r}"
        raise RequestError(message, param="model", code="model_not_found")


def _delivery(given: Mapping[str, Any]) -> dict[str, Any]:
    stream_options = given.get("stream_options", {})
    return {
        "stream": given.get("stream", False),
        "include_usage": stream_options.get("include_usage", False),
        "continuous_usage": stream_options.get("continuous_usage_stats", False),
        "priority": given.get("priority", 0),
        "preemptible": given.get("preemptible", True),
        "cache_salt": given.get("cache_salt", ""),
        "timeout_s": given.get("timeout"),
    }


# ---- completions -----------------------------------------------------------------------------------------------------


def _check_num_choices(params: SamplingParams, num_prompts: int) -> None:
    name, num_samples = ("n", params.n) if params.num_samples == params.n else ("best_of", params.num_samples)
    total = num_samples * num_prompts
    if total > MAX_CHOICES:
        message = (
            f"{num_prompts} prompts with {name}={num_samples} make {total} choices, at most {MAX_CHOICES} are allowed"
        )
        raise RequestError(message, param=name)


# ---- chat ------------------------------------------------------------------------------------------------------------


def _top_logprobs(given: Mapping[str, Any]) -> int | None:
    top = given.get("top_logprobs", 0)
    if not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must lie in 0..{MAX_LOGPROBS}, not {top}", param="top_logprobs")
    if top and not given.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return int(top) if given.get("logprobs") else None


def _template(given: Mapping[str, Any], messages: tuple[dict[str, Any], ...], model: ModelFacts) -> dict[str, Any]:
    """What the chat template is told beside the messages."""
    continues = given.get("continue_final_message", False)
    if continues and given.get("add_generation_prompt"):
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if continues and not messages[-1]["content"].strip():
        raise RequestError("the final message has no content to continue", param="continue_final_message")
    kwargs = given.get("chat_template_kwargs", {})
    for name, value in kwargs.items():
        where = f"chat_template_kwargs.{name[:100]}"
        if name not in model.options.template_kwargs:
            raise RequestError(f"{where} is not allowed here (--chat-template-kwargs)", param=where)
        if not isinstance(value, bool | int | float | str) or len(str(value)) > MAX_KWARG_CHARS:
            raise fields.wrong(value, where, f"true, false, a number or a string of {MAX_KWARG_CHARS} characters")
    return {
        "template_kwargs": kwargs,
        "add_generation_prompt": given.get("add_generation_prompt", not continues),
        "continue_final_message": continues,
    }
