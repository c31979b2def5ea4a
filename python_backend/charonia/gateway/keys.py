"""Authentication of callers: API keys, and the tenant of each.

Owns the file of keys, and the check of each request's key. Must not know the content of requests.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from charonia.errors import ConfigError
from charonia.gateway.errors import ApiError, unauthorized
from charonia.gateway.observing import record_of
from charonia.protocol.sampling_params import MAX_CHARACTERS

_SCHEME = "bearer"
_SPACES = " \t"
_SEPARATOR = re.compile(f"[{_SPACES}]+")


class Keys:
    """API keys. Only their digests are kept.

    Args:
        tenants: the tenant of each digest; None is a key whose requests may name any tenant.
    """

    def __init__(self, tenants: Mapping[bytes, str | None]) -> None:
        self._tenants = tenants

    @classmethod
    def from_file(cls, path: Path) -> "Keys":
        """Read a file with one `KEY [TENANT]` per line. Empty lines and `# …` are skipped.

        Only LF and CR LF end a line, and only spaces and tabs separate.

        Raises:
            ConfigError: it cannot be read, has no key or a wrong line. The message has no key.
        """
        try:
            lines = path.read_bytes().decode().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"API keys cannot be read from {path}: {reason}") from None
        tenants: dict[bytes, str | None] = {}
        for number, line in enumerate(lines, 1):
            line = line.removesuffix("\r").strip(_SPACES)
            if not line or line.startswith("#"):
                continue
            key, *rest = _SEPARATOR.split(line, maxsplit=1)
            tenant = rest[0] if rest else ""
            _check(f"{path}, line {number}", key, tenant)
            if _digest(key) in tenants:
                raise ConfigError(f"{path}, line {number}: the same key is in a line above")
            tenants[_digest(key)] = tenant or None
        if not tenants:
            raise ConfigError(f"{path} has no API key; each line must be `KEY` or `KEY TENANT`")
        return cls(tenants)

    def tenant_of(self, authorization: str) -> str | None:
        """Return the tenant of a request's key; None if the key has none.

        Args:
            authorization: the header; "" if it is missing.

        Raises:
            ApiError: there is no key, or it is unknown.
        """
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != _SCHEME or not key.strip():
            raise unauthorized("an API key must be given in the header `authorization: Bearer KEY`")
        digest = _digest(key.strip())
        if digest not in self._tenants:
            raise unauthorized("the API key is not known here")
        return self._tenants[digest]


class Keyed:
    """Middleware that refuses requests without a known API key.

    Args:
        free: paths that need no key. A path that ends with `/*` stands for all below it.
        refuse: answers an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        free: Collection[str],
        refuse: Callable[[Scope, ApiError], ASGIApp],
    ) -> None:
        self._app = app
        self._keys = keys
        self._free = frozenset(free)
        self._free_below = tuple(path.removesuffix("*") for path in free if path.endswith("/*"))
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        app = self._app
        if scope["type"] == "http" and not self._is_free(scope["path"]):
            given = Headers(scope=scope).get("authorization", "")
            try:
                record_of(scope).key_tenant = self._keys.tenant_of(given)
            except ApiError as error:
                app = self._refuse(scope, error)
        await app(scope, receive, send)

    def _is_free(self, path: str) -> bool:
        return path in self._free or path.startswith(self._free_below)


def _check(where: str, key: str, tenant: str) -> None:
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{where}: a key must be printable ASCII without spaces")
    most = MAX_CHARACTERS["tenant"]
    if len(tenant) > most or not tenant.isprintable() or tenant.startswith("#"):
        raise ConfigError(
            f"{where}: a tenant must have at most {most} printable characters and must not begin "
            "with #"
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
