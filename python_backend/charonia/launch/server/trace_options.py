"""Options of tritonserver for tracing.

Owns these options. With them, its own spans and the context that models see are OpenTelemetry's.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from charonia.errors import ConfigError
from charonia.tracing.endpoint import traces_url


def trace_options(endpoint: str, rate: int, others: Sequence[str] = ()) -> list[str]:
    """Options of tritonserver that trace one in `rate` requests, or with 0 only what clients trace.

    Args:
        others: what it is started with besides. Their settings of traces count.

    Returns:
        All options, the others among them.

    Raises:
        ConfigError: tritonserver cannot send to this endpoint.
    """
    if urlsplit(endpoint).scheme != "http":
        raise ConfigError(
            f"--otlp-traces-endpoint = {endpoint!r} must begin with http:// because tritonserver"
            " sends its spans by OTLP/HTTP without TLS; scheduler.otlp_traces_endpoint may be"
            " another one"
        )
    settings = (
        "mode=opentelemetry",
        f"opentelemetry,url={traces_url(endpoint)}",
        "level=TIMESTAMPS",
        f"rate={rate}",
    )
    return [*(f"--trace-config={setting}" for setting in settings), *others]
