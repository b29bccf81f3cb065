"""Who is asking: no page of another origin, and every path but /health needs a key, if there are keys at all.

A key comes as `Authorization: Bearer KEY`; browsers, which cannot send that with a page they open, are asked for it as
the password of Basic authentication. `scope["state"]["caller"]` tells the routes who it is.
"""

import base64
import binascii
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pagedjax.core.errors import RequestError
from pagedjax.core.tenants import DEFAULT_TENANT
from serving import errors
from serving.access import keys, origins
from serving.access.keys import ApiKey
from serving.protocol import MAX_HEADER_BYTES, header_bytes

if TYPE_CHECKING:
    from serving.service import Service

UNGUARDED = frozenset({"/health"})
CHALLENGE = 'Bearer realm="pagedjax", Basic realm="pagedjax (the key is the password)"'


@dataclass(frozen=True, slots=True)
class Caller:
    """`key` is None where none is asked for."""

    key: ApiKey | None = None
    tenant: str = DEFAULT_TENANT

    @property
    def is_admin(self) -> bool:
        return self.key is not None and self.key.role == "admin"


Endpoint = Callable[[Request], Awaitable[Any]]


class Guard:
    """ASGI middleware under Edge: answers whoever may not ask."""

    def __init__(self, app: ASGIApp, *, service: "Service") -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, headers = scope["state"], Headers(scope=scope)
        state["caller"] = Caller()
        try:
            _check_size(scope)
            origins.check_host(headers, self._service.options, has_keys=bool(self._service.keys))
            origins.check_origin(scope["method"], headers)
            if scope["path"] not in UNGUARDED:
                state["caller"] = self._caller(headers)
        except RequestError as error:
            state["notes"]["error"] = errors.name_of(error)
            if errors.status_of(error) == 401:
                state["headers"]["www-authenticate"] = CHALLENGE
            await errors.error_response(error, state["request_id"])(scope, receive, send)
            return
        if state["caller"].key is not None:
            state["notes"]["key"] = state["caller"].key.name
        await self._app(scope, receive, send)

    def _caller(self, headers: Headers) -> Caller:
        named = headers.get("x-tenant") if self._service.trust_tenant_header else None
        if not self._service.keys:
            return Caller(None, named or DEFAULT_TENANT)
        secret = secret_of(headers.get("authorization", ""))
        if secret is None:
            message = "this server needs an API key: send the header Authorization: Bearer KEY"
            raise RequestError(message, code="missing_api_key")
        key = keys.find(self._service.keys, secret)
        if key is None:
            raise RequestError("the API key is not known here", code="invalid_api_key")
        return Caller(key, named or key.tenant)


def _check_size(scope: Scope) -> None:
    if (num_bytes := header_bytes(scope)) > MAX_HEADER_BYTES:
        message = f"the request's headers have {num_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed"
        raise RequestError(message, code="headers_too_large")


def secret_of(authorization: str) -> str | None:
    """The key in an Authorization header, or None."""
    scheme, _, rest = authorization.strip().partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return rest or None
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(rest, validate=True).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        return None
    return decoded.partition(":")[2] or None


def admin_only(endpoint: Endpoint) -> Endpoint:
    """A route for admin keys alone: closed where there are no keys, since then nobody is known to be one."""

    @wraps(endpoint)
    async def guarded(request: Request) -> Any:
        if not request.state.caller.is_admin:
            raise RequestError("this needs an API key with the role admin (--api-keys)", code="forbidden")
        return await endpoint(request)

    return guarded


def operators_only(endpoint: Endpoint) -> Endpoint:
    """A route that shows what all tenants do: for admin keys, or for anybody where there are no keys."""

    @wraps(endpoint)
    async def guarded(request: Request) -> Any:
        caller: Caller = request.state.caller
        if caller.key is not None and not caller.is_admin:
            raise RequestError("this needs an API key with the role admin", code="forbidden")
        return await endpoint(request)

    return guarded
