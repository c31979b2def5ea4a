"""Headers that tritonserver makes parameters of requests.

Owns the forwarding of a client's trace context, whatever else is forwarded. Lines of the log have
the trace id from it, and over gRPC Triton loses some contexts: see `traceparent_of`.
"""

from collections.abc import Sequence

from charonia.server_options import header_pattern
from charonia.tracing.traceparent import TRACEPARENT


def header_options(others: Sequence[str] = ()) -> list[str]:
    """Options of tritonserver that forward trace contexts over every protocol.

    Args:
        others: what it is started with besides. What they forward is forwarded, too; so these
            options must come after them.
    """
    return [
        # HTTP keeps the case of a header's name.
        _option("http", others, f"(?i:^{TRACEPARENT}$)"),
        _option("grpc", others, f"^{TRACEPARENT}$"),
    ]


def _option(protocol: str, others: Sequence[str], own: str) -> str:
    pattern = "|".join(filter(None, (header_pattern(others, protocol), own)))
    return f"--{protocol}-header-forward-pattern={pattern}"
