"""The proxy that the environment names: it cannot reach what only this machine can."""

import ipaddress
from urllib.parse import urlsplit


def is_local(url: str) -> bool:
    """Return whether a URL, or `host:port`, is of this machine's loopback interface."""
    host = urlsplit(url if "://" in url else f"//{url}").hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def mounts_of(url: str) -> dict[str, None]:
    """The argument `mounts` of a client of httpx that asks servers at `url`."""
    if not is_local(url):
        return {}
    host = urlsplit(url).hostname or ""
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None}
