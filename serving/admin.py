"""Routes for whoever runs the server: drain, look at the requests, end one, read keys again, log level, profile."""

import logging
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagedjax.core.errors import ConfigError, RequestError
from serving import errors
from serving.access.guard import admin_only
from serving.errors import json_response
from serving.requests import fields
from serving.service import service_of

log = logging.getLogger(__name__)

LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_ADMIN_BODY_BYTES = 4096
MAX_PROFILE_S = 60


@admin_only
async def drain(request: Request) -> Response:
    """Take no new requests from now on; those here go on. There is no way back but a new start."""
    service = service_of(request)
    service.drain()
    log.info("event=drain_asked active=%d", len(service.active))
    return json_response({"status": "draining", "active": len(service.active)})


@admin_only
async def queue(request: Request) -> Response:
    """The requests that are being answered, oldest first, and sequences by tenant."""
    service = service_of(request)
    service.check_loaded()
    load = service.engine.load()
    running = load.running
    waiting = {tenant: line.num_requests for tenant, line in load.waiting.queues.items()}
    tenants = {
        name: {"running": running.get(name, 0), "waiting": waiting.get(name, 0)} for name in {**running, **waiting}
    }
    return json_response({"requests": service.active.listing(), "tenants": tenants})


@admin_only
async def abort(request: Request) -> Response:
    """End one request with an error."""
    request_id = request.path_params["request_id"]
    if not service_of(request).active.cancel(request_id):
        raise RequestError(f"no request {errors.clean(request_id[:100])} is being answered", code="not_found")
    log.info("event=request_aborted id=%s", errors.clean(request_id[:100]))
    return json_response({"id": request_id, "status": "cancelled"})


@admin_only
async def reload_keys(request: Request) -> Response:
    """Read the keys again. Where they cannot be read the old ones stay."""
    service = service_of(request)
    try:
        num_keys = service.reload_keys()
    except ConfigError as error:
        raise RequestError(f"the keys stay as they were: {error}", code="keys_unreadable") from error
    log.info("event=keys_reloaded num_keys=%d", num_keys)
    return json_response({"keys": num_keys})


@admin_only
async def log_level(request: Request) -> Response:
    """Show or set the least severe level that is logged."""
    if request.method == "PUT":
        body = await _small_body(request)
        level = fields.required(fields.known_fields(body, {"level": fields.string}), "level")
        if level not in LOG_LEVELS:
            raise RequestError(f"level must be one of {', '.join(LOG_LEVELS)}", param="level")
        await service_of(request).engine.set_log_level(level)
    shown = logging.getLevelName(logging.getLogger("serving").getEffectiveLevel()).lower()
    return json_response({"level": shown})


@admin_only
async def profile(request: Request) -> Response:
    """Have JAX profile the engine for some seconds; answers when the profile is written, into --profile-dir."""
    service = service_of(request)
    service.check_loaded()
    directory = service.options.profile_dir
    if directory is None:
        raise RequestError("no profiles are taken here; start the server with --profile-dir", code="profiles_off")
    given = fields.known_fields(await _small_body(request), PROFILE)
    duration_s = given.get("seconds", 1.0)
    log.info("event=profile_asked seconds=%g", duration_s)
    await service.engine.profile(directory, duration_s)
    return json_response({"directory": directory, "seconds": duration_s})


def _profile_seconds(value: Any, name: str) -> float:
    if not 0 < fields.number(value, name) <= MAX_PROFILE_S:
        raise RequestError(f"{name} must lie above 0 and be at most {MAX_PROFILE_S}, not {value}", param=name)
    return float(value)


PROFILE: dict[str, fields.Check] = {"seconds": _profile_seconds}
ROUTES = [
    Route("/admin/drain", drain, methods=["POST"]),
    Route("/admin/queue", queue, methods=["GET"]),
    Route("/admin/abort/{request_id}", abort, methods=["POST"]),
    Route("/admin/reload-keys", reload_keys, methods=["POST"]),
    Route("/admin/log-level", log_level, methods=["GET", "PUT"]),
    Route("/admin/profile", profile, methods=["POST"]),
]


async def _small_body(request: Request) -> dict[str, Any]:
    body = await request.body() or b"{}"
    if len(body) > MAX_ADMIN_BODY_BYTES:
        raise RequestError(f"the body is larger than {MAX_ADMIN_BODY_BYTES} bytes", code="body_too_large")
    try:
        return fields.record(orjson.loads(body), fields.BODY)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
