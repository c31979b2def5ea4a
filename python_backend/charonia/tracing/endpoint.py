"""The address of an OTLP collector.

Owns which addresses are accepted.
"""

from urllib.parse import urlsplit

from charonia.errors import ConfigError, shown

TRACES_PATH = "/v1/traces"


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError: it is not an endpoint as `TraceProvider` takes it."""
    try:
        parts = urlsplit(endpoint)
        is_right = parts.scheme in ("http", "https", "grpc", "grpcs") and bool(parts.hostname)
        is_right = is_right and (parts.port is not None or parts.scheme in ("http", "https"))
    except ValueError:  # the port is no number
        is_right = False
    if not is_right:
        raise ConfigError(
            f"otlp_traces_endpoint = {shown(endpoint)} must be an OTLP collector's"
            " http://HOST:PORT (or https) or grpc://HOST:PORT (or grpcs)"
        )


def traces_url(endpoint: str) -> str:
    """The URL of an OTLP/HTTP endpoint, with its default path if it has none."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{TRACES_PATH}"
