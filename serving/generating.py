"""The routes that have tokens made, or counted: parse, submit, and leave the answer to a Generation."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from pagedjax.core.errors import RequestError
from serving import errors, tokenizing
from serving.active import Active
from serving.answers.chat_rendering import ChatRendering
from serving.answers.completion_rendering import CompletionRendering
from serving.answers.openai import Head, Rendering
from serving.answers.responses import ResponseRendering
from serving.embedding import EmbeddingCall, EmbeddingRendering, parse_embedding
from serving.errors import json_response
from serving.generation import Generation
from serving.requests.response_call import parse_response
from serving.requests.schemas import ChatCall, CompletionCall, parse_chat, parse_completion
from serving.service import Service, service_of
from serving.tools import tool_prompt
from serving.tools.tool_calls import ToolFormat

if TYPE_CHECKING:
    from pagedjax.engine.submission import Submission


async def completions(request: Request) -> Generation:
    service, head = service_of(request), _head(request, "cmpl")
    call, submissions = await service.read(request, head.id, parse_completion)
    rendering = CompletionRendering(head, call, service.engine.tokenizer)
    return _generation(request, head, call, submissions, rendering)


async def chat_completions(request: Request) -> Generation:
    service, head = service_of(request), _head(request, "chatcmpl")
    call, submissions = await service.read(request, head.id, parse_chat)
    rendering = ChatRendering(head, call, service.engine.tokenizer, _tool_format(service))
    return _generation(request, head, call, submissions, rendering)


async def embeddings(request: Request) -> Generation:
    head = _head(request, "embd")
    call, submissions = await service_of(request).read(request, head.id, parse_embedding)
    return _generation(request, head, call, submissions, EmbeddingRendering(head, call))


async def responses(request: Request) -> Generation:
    service, head = service_of(request), _head(request, "resp")
    call, submissions = await service.read(request, head.id, parse_response)
    rendering = ResponseRendering(head, call, service.engine.tokenizer, _tool_format(service))
    return _generation(request, head, call.chat, submissions, rendering)


async def tokenize(request: Request) -> Response:
    return json_response(await service_of(request).compute(request, tokenizing.tokenize))


async def detokenize(request: Request) -> Response:
    return json_response(await service_of(request).compute(request, tokenizing.detokenize))


async def cancel(request: Request) -> Response:
    """End one's own request with an error; an admin key may end anybody's."""
    service, request_id, caller = service_of(request), request.path_params["request_id"], request.state.caller
    if not service.active.cancel(request_id, tenant=None if caller.is_admin else caller.tenant):
        raise RequestError(f"no request {errors.clean(request_id[:100])} is being answered", code="not_found")
    return json_response({"id": request_id, "object": "request", "status": "cancelled"})


def _tool_format(service: Service) -> ToolFormat:
    wish = service.options.tool_call_parser
    return tool_prompt.format_for(service.engine.tokenizer.chat_template_text) if wish == "auto" else wish


def _generation(
    request: Request,
    head: Head,
    call: CompletionCall | ChatCall | EmbeddingCall,
    submissions: Sequence["Submission"],
    rendering: Rendering,
) -> Generation:
    service, caller = service_of(request), request.state.caller
    streams = service.submit(request, submissions)

    def charge(num_tokens: int) -> None:
        if caller.key is not None:
            service.limits.charge_output(caller.key, num_tokens)

    active = Active(
        head.id,
        caller.tenant,
        request.url.path,
        num_prompt_tokens=sum(len(stream.prompt_token_ids) for stream in streams),
        num_sequences=sum(one.params.num_samples for one in submissions),
        charge=charge,
        began_s=request.state.arrival_s,
        timeout_s=service.time_limit_s(call.timeout_s),
    )
    return Generation(streams, call, rendering, service, active)


def _head(request: Request, prefix: str) -> Head:
    engine = service_of(request).engine
    return Head(f"{prefix}-{request.state.request_id}", int(time.time()), engine.model_name)
