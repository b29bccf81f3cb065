"""API keys: who may ask, as which tenant, and how much. Held as SHA-256 hashes, which a file may hold too.

Keys are random and long, so that a plain hash keeps them: there is nothing to guess.
"""

import hmac
import logging
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

from pagedjax.core.errors import ConfigError
from pagedjax.core.request import MAX_PRIORITY, MIN_PRIORITY
from pagedjax.core.tenants import DEFAULT_TENANT, is_tenant_name

log = logging.getLogger(__name__)

Role = Literal["user", "admin"]
HASH_PREFIX = "sha256:"
MIN_KEY_CHARS = 16
# Where the environment may hold a key of each role.
VARIABLES: Mapping[Role, str] = {"user": "PAGEDJAX_API_KEY", "admin": "PAGEDJAX_ADMIN_API_KEY"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What one key allows. `priority_cap` is the best (lowest) priority that may be asked for, `queue_share` the part
    of the queue that the key's tenant may fill. None means without a limit. Raises ConfigError for a value out of
    range.
    """

    name: str
    digest: bytes
    tenant: str = DEFAULT_TENANT
    role: Role = "user"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority_cap: int = MIN_PRIORITY
    queue_share: float = 1.0

    def __post_init__(self) -> None:
        if not is_tenant_name(self.tenant):
            raise self._wrong("tenant", "a name of 1 to 64 letters, digits and _ . : @ / -")
        if self.role not in get_args(Role):
            raise self._wrong("role", "user or admin")
        for limit in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, limit)
            if value is not None and not (_is_int(value) and value > 0):
                raise self._wrong(limit, "an integer above 0")
        if not _is_int(self.priority_cap) or not MIN_PRIORITY <= self.priority_cap <= MAX_PRIORITY:
            raise self._wrong("priority_cap", f"an integer from {MIN_PRIORITY} to {MAX_PRIORITY}")
        if isinstance(self.queue_share, bool) or not isinstance(self.queue_share, int | float):
            raise self._wrong("queue_share", "a number above 0 and at most 1")
        if not 0 < self.queue_share <= 1:
            raise self._wrong("queue_share", "a number above 0 and at most 1")

    def _wrong(self, field: str, wanted: str) -> ConfigError:
        return ConfigError(f"--api-keys: {field} of key {self.name!r} must be {wanted}, not {getattr(self, field)!r}")


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where keys come from: a file, and secrets from the environment by the role that they have."""

    path: str | None = None
    secrets: tuple[tuple[Role, str], ...] = ()

    def load(self) -> tuple[ApiKey, ...]:
        """The keys as they are now; none means that nobody is asked for one. Raises ConfigError."""
        keys = read_keys(self.path) if self.path is not None else ()
        for role, secret in self.secrets:
            # An empty one too: whoever sets it means that keys are asked for.
            if len(secret) < MIN_KEY_CHARS:
                raise ConfigError(
                    f"{VARIABLES[role]} has {len(secret)} characters; a key needs {MIN_KEY_CHARS}; "
                    "unset it, or make one with `pagedjax keys NAME`"
                )
            keys += (ApiKey(name=f"environment-{role}", digest=digest(secret), role=role),)
        seen: set[bytes] = set()
        for key in keys:
            if key.digest in seen:
                raise ConfigError(f"--api-keys: {key.name!r} is the same key as another; give each its own")
            seen.add(key.digest)
        return keys


def new_key() -> str:
    """A key that nobody can guess."""
    return f"pj-{secrets.token_urlsafe(32)}"


def digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def shown_hash(key: str) -> str:
    """A key's hash as the file has it."""
    return HASH_PREFIX + digest(key).hex()


def find(keys: Iterable[ApiKey], secret: str) -> ApiKey | None:
    """The key whose secret this is. Looks at all of them, in constant time each."""
    wanted, found = digest(secret), None
    for key in keys:
        if hmac.compare_digest(key.digest, wanted):
            found = key
    return found


def read_keys(path: str) -> tuple[ApiKey, ...]:
    """The [[keys]] of a TOML file. Raises ConfigError, which never shows a key."""
    try:
        with open(path, "rb") as file:
            written = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--api-keys {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        # The parser's own message may quote a line of the file.
        raise ConfigError(f"--api-keys {path}: not TOML") from None
    entries = written.get("keys")
    if set(written) != {"keys"} or not isinstance(entries, list) or not entries:
        raise ConfigError(f"--api-keys {path}: it must hold [[keys]] tables and nothing else")
    if any(isinstance(entry, dict) and "key" in entry for entry in entries) and Path(path).stat().st_mode & 0o044:
        log.warning("event=keys_readable_by_others path=%s", path)
    return tuple(_key(entry, f"key-{number}") for number, entry in enumerate(entries, 1))


def _key(entry: Any, default_name: str) -> ApiKey:
    if not isinstance(entry, Mapping):
        raise ConfigError("--api-keys: keys must be tables, written [[keys]]")
    name = entry.get("name", default_name)
    if not isinstance(name, str) or not is_tenant_name(name):
        raise ConfigError(f"--api-keys: the name of {default_name} must have 1 to 64 letters, digits and _ . : @ / -")
    known = {field.name for field in fields(ApiKey)} - {"digest"} | {"key", "hash"}
    if unknown := sorted(set(entry) - known):
        raise ConfigError(f"--api-keys: key {name!r} has an unknown field {unknown[0]!r}; known are {sorted(known)}")
    settings = {field: value for field, value in entry.items() if field not in ("key", "hash", "name")}
    return ApiKey(name=name, digest=_digest(entry, name), **settings)


def _digest(entry: Mapping[str, Any], name: str) -> bytes:
    key, hashed = entry.get("key"), entry.get("hash")
    if (key is None) == (hashed is None):
        raise ConfigError(f"--api-keys: key {name!r} must have either key or hash; pagedjax keys makes both")
    if key is not None:
        if not isinstance(key, str) or len(key) < MIN_KEY_CHARS:
            raise ConfigError(f"--api-keys: key {name!r} is too easy to guess; it needs {MIN_KEY_CHARS} characters")
        return digest(key)
    try:
        found = bytes.fromhex(str(hashed).removeprefix(HASH_PREFIX))
    except ValueError:
        found = b""
    if len(found) != sha256().digest_size:
        raise ConfigError(f"--api-keys: the hash of key {name!r} must read {HASH_PREFIX} and 64 hexadecimal digits")
    return found


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
