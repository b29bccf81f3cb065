"""Faults as HTTP: which status they have, and OpenAI's error body."""

from typing import Any

import orjson
from starlette.responses import Response

from pagedjax.core.errors import RequestError

STATUS_OF_CODE = {
    "missing_api_key": 401,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "not_found": 404,
    "cross_origin": 403,
    "forbidden": 403,
    "priority_not_allowed": 403,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "profile_running": 409,
    "body_too_large": 413,
    "unsupported_encoding": 415,
    "headers_too_large": 431,
    "queue_full": 429,
    "rate_limit_exceeded": 429,
    "cancelled": 499,
    "draining": 503,
    "shutting_down": 503,
    "not_ready": 503,
    "deadline_exceeded": 504,
    "queue_timeout": 504,
}
CODES_OF_SIZE = frozenset({"context_length_exceeded", "prompt_exceeds_kv_cache", "prompt_exceeds_queue", "queue_full"})
RETRY_AFTER_S = {429: "1", 503: "10"}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


def shutting_down() -> RequestError:
    return RequestError("the server is shutting down and ended this request; send it again", code="shutting_down")


def cancelled() -> RequestError:
    return RequestError("the request was cancelled", code="cancelled")


def deadline_exceeded(timeout_s: float) -> RequestError:
    message = f"the request was not answered within its {timeout_s:g} s (timeout, --request-timeout-s)"
    return RequestError(message, code="deadline_exceeded")


def status_of(error: Exception) -> int:
    """A RequestError's status follows from its code (400 without a known one); any other exception is our fault."""
    return STATUS_OF_CODE.get(error.code or "", 400) if isinstance(error, RequestError) else 500


def name_of(error: Exception) -> str:
    """One word for logs and metrics."""
    if isinstance(error, ClientGone):
        return "client_gone"
    return (error.code or "invalid_request") if isinstance(error, RequestError) else "internal_error"


def error_body(error: Exception, request_id: str) -> dict[str, Any]:
    """OpenAI's error object. What went wrong inside stays in the log; the client gets the request id."""
    status = status_of(error)
    if isinstance(error, RequestError):
        message, param, code = error.message, error.param, error.code
    else:
        message, param, code = f"the server failed on this request (request id {request_id})", None, "internal_error"
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": clean(message), "type": kind, "param": param and clean(param), "code": code}}


def error_response(error: Exception, request_id: str) -> Response:
    status = status_of(error)
    return json_response(error_body(error, request_id), status, retry_headers(status))


def retry_headers(status: int) -> dict[str, str]:
    """When to try again, for a status that passes."""
    return {"retry-after": RETRY_AFTER_S[status]} if status in RETRY_AFTER_S else {}


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def clean(text: str) -> str:
    """`text` fit for UTF-8 and a log line: lone surrogates escaped, and cut, since it may quote the request."""
    return text[:1000].encode("utf-8", "backslashreplace").decode()
