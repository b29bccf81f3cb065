"""Which web pages may ask: those that this server shows, under a name that is its own.

A browser sends what a foreign page asks for together with the key that it keeps for this server, and for simple kinds
of body without asking first. So what may change something must come from a page of the same origin: Sec-Fetch-Site
says so, or where a browser does not send it (to http:// addresses of other machines), Origin beside Host does. A page
whose name was turned to this machine after it was loaded (DNS rebinding) counts as same-origin for a browser; only
Host tells it from ours.
"""

from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

from pagedjax.core.errors import RequestError
from serving.options import ApiOptions

_SAFE_METHODS = ("GET", "HEAD")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def check_origin(method: str, headers: Headers) -> None:
    """Raises RequestError cross_origin for what a page of another origin asks for, unless it only reads.

    What a foreign page may ask to read is never shown to it, since no answer names it as allowed (CORS).
    """
    if method in _SAFE_METHODS:
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    # A proxy may rewrite Host; the browser's own word that the page is ours needs none.
    is_foreign = origin is not None and site != "same-origin" and not _is_same(origin, headers.get("host", ""))
    if is_foreign or site in ("cross-site", "same-site"):
        raise RequestError("requests from pages of other origins are refused", code="cross_origin")


def check_host(headers: Headers, options: ApiOptions, *, has_keys: bool) -> None:
    """Raises RequestError cross_origin for a name in Host that is not ours.

    Looked at where names were given, and where none but this machine's browsers can reach the server and nobody is
    asked for a key: there a rebound name is all that an attack needs.
    """
    if not options.allowed_hosts and (options.local_name is None or has_keys):
        return
    # Browsers always send it.
    host = headers.get("host")
    if host is None:
        return
    name = _hostname(host)
    if name is None or not (is_local_or_literal(name) or name in options.allowed_hosts | {options.local_name}):
        message = f"this server does not go by the name in Host, {host[:100]!r}; --allowed-hosts gives it more names"
        raise RequestError(message, code="cross_origin")


def is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def is_local_or_literal(name: str) -> bool:
    """What no DNS server decides: localhost, and addresses."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _hostname(host: str) -> str | None:
    try:
        found = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return found and found.removesuffix(".")


def _is_same(origin: str, host: str) -> bool:
    """Whether an Origin names the authority in Host; null, which hides where a page is from, never does."""
    try:
        page, ours = urlsplit(origin), urlsplit(f"//{host}")
        return bool(page.hostname) and _authority(page, page.scheme) == _authority(ours, page.scheme)
    except ValueError:
        return False


def _authority(parts: SplitResult, scheme: str) -> tuple[str | None, int | None]:
    return parts.hostname, parts.port or _DEFAULT_PORTS.get(scheme)
