"""How our processes call servers on their own machine.

Owns what these connections have in common. Must not know what is asked. A proxy, which the
environment may name for calls to other machines, cannot reach this one. Without TLS nothing reads
the system's certificates, which takes a client of httpx as much computing as 20 calls. Connections
are not kept, because tritonserver would wait for them at its end.
"""

from collections.abc import Mapping

import httpx
import tritonclient.grpc


def http_client(*, base_url: str = "", timeout_s: float = 5.0) -> httpx.Client:
    """A client for URLs that begin with http://."""
    return httpx.Client(
        base_url=base_url,
        headers={"Connection": "close"},
        timeout=timeout_s,
        trust_env=False,
        verify=False,
    )


def without_proxy(environment: Mapping[str, str], address: str) -> dict[str, str]:
    """The environment of a process that also calls `host:port` by others' clients."""
    host = address.rpartition(":")[0].strip("[]")
    listed = {name: environment.get(name) for name in ("no_proxy", "NO_PROXY")}
    return {
        **environment,
        **{name: f"{hosts},{host}" if hosts else host for name, hosts in listed.items()},
    }


def grpc_client(url: str) -> tritonclient.grpc.InferenceServerClient:
    """A client for small messages to Triton at `host:port`."""
    return tritonclient.grpc.InferenceServerClient(
        url, channel_args=[("grpc.enable_http_proxy", 0)]
    )
