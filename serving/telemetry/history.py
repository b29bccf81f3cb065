"""Routes that tell what was: one request's whole life, and the latest steps one by one. No texts, no token ids."""

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagedjax.core.errors import RequestError
from serving import errors
from serving.access.guard import operators_only
from serving.errors import json_response
from serving.service import service_of

if TYPE_CHECKING:
    from pagedjax.engine.lives import LifeStory, Moment

MAX_STEPS = 1024
# An answer's id is one of these and the id in the header x-request-id.
ID_PREFIXES = ("cmpl", "chatcmpl", "resp", "embd")
_NO_STORE = {"cache-control": "no-store"}


@operators_only
async def request_life(request: Request) -> Response:
    """By the id in the answer, or the one in its header x-request-id, which the access log has."""
    service, wanted = service_of(request), request.path_params["request_id"]
    service.check_loaded()
    names = [wanted] if "-" in wanted else [f"{prefix}-{wanted}" for prefix in ID_PREFIXES]
    stories = [story for name in names for story in await service.engine.lives(name)]
    if not stories:
        message = f"of a request {errors.clean(wanted[:100])} nothing is known, or nothing any more"
        raise RequestError(message, code="not_found")
    return json_response({"id": wanted, "prompts": [shown_life(story) for story in stories]}, headers=_NO_STORE)


@operators_only
async def steps(request: Request) -> Response:
    """Those with a number above `since`, at most MAX_STEPS of the latest, oldest first."""
    service = service_of(request)
    service.check_loaded()
    since = request.query_params.get("since", "-1")
    if not since.removeprefix("-").isdecimal() or len(since) > 18:
        raise RequestError("since must be the number of a step", param="since")
    found = await service.engine.steps(int(since), MAX_STEPS)
    return json_response({"steps": [step._asdict() for step in found]}, headers=_NO_STORE)


ROUTES = [
    Route("/debug/requests/{request_id}", request_life, methods=["GET"]),
    Route("/debug/steps", steps, methods=["GET"]),
]


def shown_life(story: "LifeStory") -> dict[str, Any]:
    """Times in milliseconds since the request came to the engine; its sequences are numbered from 0."""
    begin_us = story.moments[0].at_us
    numbers: dict[int, int] = {}
    return {
        "id": story.request_id,
        "state": "ended" if story.is_over else "open",
        "tenant": story.tenant,
        "priority": story.priority,
        "prompt_tokens": story.prompt_len,
        "max_tokens": story.max_tokens,
        "arrived": round(story.arrival_s, 6),
        "left_out": story.num_left_out,
        "events": [_shown(moment, begin_us, numbers) for moment in story.moments],
    }


def _shown(moment: "Moment", begin_us: int, numbers: dict[int, int]) -> dict[str, Any]:
    number = numbers.setdefault(moment.sequence_id, len(numbers))
    return {"at_ms": (moment.at_us - begin_us) / 1000, "event": moment.event, "sequence": number, **moment.facts}
