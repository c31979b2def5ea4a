"""How our processes call servers on their own machine, and those that an operator names.

Owns what these connections have in common. Must not know what is asked.

- They never use the proxy that the environment names for calls to elsewhere.
- There is no TLS, so no certificates are read. A client of httpx would read them when it is made,
  which takes as much computing as 20 calls.
- None is kept alive, because tritonserver would wait for it at its end. Limiting the pool to none
  would still leave one open if another thread closes the client meanwhile.
"""

import contextlib
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the scheduler's process needs the options alone
    import httpx
    import tritonclient.grpc

GRPC_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1))
"""Options of a gRPC channel: no proxy, and answers of any length."""


def http_client(*, base_url: str = "", timeout_s: float = 5.0) -> "httpx.Client":
    """A client for URLs that begin with http://; it trusts no server with https://."""
    import httpx

    return httpx.Client(
        base_url=base_url,
        headers={"Connection": "close"},
        timeout=timeout_s,
        trust_env=False,
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )


def grpc_client(url: str) -> "contextlib.closing[tritonclient.grpc.InferenceServerClient]":
    """A client of tritonserver's gRPC endpoint, which is closed at the end of the `with`."""
    import tritonclient.grpc

    options = list(GRPC_OPTIONS)
    return contextlib.closing(tritonclient.grpc.InferenceServerClient(url, channel_args=options))
