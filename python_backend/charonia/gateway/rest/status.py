"""/v1/health and /v1/metrics: how the gateway and its servers are.

Owns the form of both. Must not know routes.
"""

from dataclasses import asdict
from typing import Any

from charonia.gateway.figures import Figures
from charonia.gateway.upstream import Upstream
from charonia_client import Load


async def health(upstream: Upstream, *, is_draining: bool) -> dict[str, Any]:
    """Whether the gateway and one of its servers would take a request now, and each server."""
    if is_draining:
        return {"status": "draining"}
    states = await upstream.states()
    servers = [
        {
            "server": server.url,
            "ready": state is not None and state.is_up,
            "reason": "no answer" if state is None else state.reason,
        }
        for server, state in zip(upstream.servers, states, strict=True)
    ]
    is_ready = any(one["ready"] for one in servers)
    return {"status": "ready" if is_ready else "not ready", "servers": servers}


async def metrics(upstream: Upstream, figures: Figures, num_in_flight: int) -> dict[str, Any]:
    """What clients got from this gateway, and what its servers have to do.

    `avg_throughput_tokens_per_sec` is all tokens over all latencies of the answers that are
    complete. `cache_hit_rate` and `acceptance_rate` are of all servers together, since their start.
    """
    states = await upstream.states()
    servers = [
        {
            "server": server.url,
            "is_up": state is not None and state.is_up,
            "reason": "no answer" if state is None else state.reason,
            "load": None if state is None or state.load is None else asdict(state.load),
        }
        for server, state in zip(upstream.servers, states, strict=True)
    ]
    loads = [one.load for one in states if one is not None and one.load is not None]
    ttft_s, latency_s = figures.ttft_s, figures.latency_s
    return {
        "total_requests": figures.num_answers,
        "total_tokens_generated": figures.num_tokens,
        "avg_latency_ms": None if latency_s is None else 1000 * latency_s,
        "avg_throughput_tokens_per_sec": figures.throughput,
        "cache_hit_rate": _rate(loads, "cache_hit_tokens", "cache_queried_tokens"),
        "acceptance_rate": _rate(loads, "accepted_tokens", "draft_tokens"),
        "uptime_s": figures.uptime_s,
        "requests_in_flight": num_in_flight,
        "tokens_per_sec": figures.tokens_per_s,
        "ttft_ms": None if ttft_s is None else {"p50": 1000 * ttft_s[0], "p99": 1000 * ttft_s[1]},
        "servers": servers,
    }


def _rate(loads: list[Load], part: str, whole: str) -> float | None:
    """A share of all servers' counts; None where there is nothing to have a share of."""
    total = sum(getattr(load, whole) for load in loads)
    return sum(getattr(load, part) for load in loads) / total if total else None
