"""/v1/completions: the whole body, and the chunks of a stream."""

from collections.abc import Mapping, Sequence
from typing import Any

from serving.answers import sse
from serving.answers.logprobs import completion_logprobs, prompt_logprobs, prompt_tokens
from serving.answers.offsets import TextOffsets
from serving.answers.openai import Choice, Head, body_of, choice_of, chunk_usage
from serving.interfaces import Delta, Tokenizer, TokenLogprobs
from serving.requests.inputs import Prompt
from serving.requests.schemas import CompletionCall


class CompletionRendering:
    """/v1/completions."""

    done = sse.DONE

    def __init__(self, head: Head, call: CompletionCall, tokenizer: Tokenizer) -> None:
        self._head, self._call, self._tokenizer = head, call, tokenizer
        self._templates: dict[int, sse.Template] = {}

    def begin(self, choice: Choice) -> bytes:
        if not self._call.echo:
            return b""
        return self._event(choice, self._prompt_text(choice), self._prompt_logprobs(choice))

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        is_plain = self._call.logprobs is None and delta.finish_reason is None and not self._call.continuous_usage
        if is_plain:
            return self._template(choice).fill(delta.text) if delta.text else b""
        logprobs = self._logprobs(choice, delta.token_ids, delta.logprobs or ())
        return self._event(choice, delta.text, logprobs, delta)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return sse.event(body_of(self._head, "text_completion", []) | {"usage": usage})

    def failure(self, error: Mapping[str, Any]) -> bytes:
        return sse.failure(error)

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return body_of(self._head, "text_completion", [self._whole(choice) for choice in choices]) | {"usage": usage}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text, echoed = "".join(choice.texts), None
        if self._call.echo:
            text, echoed = self._prompt_text(choice) + text, self._prompt_logprobs(choice)
        logprobs = self._logprobs(choice, choice.token_ids, choice.logprobs)
        if echoed and logprobs:
            logprobs = {name: echoed[name] + logprobs[name] for name in logprobs}
        body = choice_of(choice, {"text": text}, logprobs, choice)
        if self._call.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(choice.stream, self._call.prompt_logprobs)
        return body

    def _prompt_text(self, choice: Choice) -> str:
        prompt = self._prompt(choice)
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=self._call.params.skip_special_tokens)

    def _prompt(self, choice: Choice) -> Prompt:
        return self._call.prompts[choice.index // self._call.params.n]

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self._call.logprobs is None:
            return None
        stream, text = choice.stream, self._prompt_text(choice)
        is_written = isinstance(self._prompt(choice), str)
        offsets = self._offsets(choice).of_prompt(stream.prompt_token_ids, text, is_written=is_written)
        return completion_logprobs(prompt_tokens(stream), self._call.logprobs, self._tokenizer, offsets)

    def _logprobs(
        self, choice: Choice, token_ids: Sequence[int], found: Sequence[TokenLogprobs]
    ) -> dict[str, Any] | None:
        """Continues the choice's text offsets."""
        if self._call.logprobs is None:
            return None
        offsets = self._offsets(choice).of_answer(token_ids)
        return completion_logprobs(zip(token_ids, found), self._call.logprobs, self._tokenizer, offsets)

    def _offsets(self, choice: Choice) -> TextOffsets:
        if choice.offsets is None:
            skip = self._call.params.skip_special_tokens
            choice.offsets = TextOffsets(self._tokenizer, skip_special_tokens=skip)
        return choice.offsets

    def _event(self, choice: Choice, text: str, logprobs: Any, end: Delta | None = None) -> bytes:
        chunk = body_of(self._head, "text_completion", [choice_of(choice, {"text": text}, logprobs, end)])
        return sse.event(chunk | chunk_usage(self._call, choice))

    def _template(self, choice: Choice) -> sse.Template:
        if choice.index not in self._templates:
            chunk = body_of(self._head, "text_completion", [choice_of(choice, {"text": sse.HOLE}, None)])
            self._templates[choice.index] = sse.template(chunk | chunk_usage(self._call, choice))
        return self._templates[choice.index]
