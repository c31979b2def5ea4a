"""/v1/health and /v1/metrics: how the gateway and its servers are.

Owns the form of both. Must not know routes.
"""

from msgspec import UNSET

from charonia.gateway.figures import Figures
from charonia.gateway.rest.answers import (
    Health,
    MetricsAnswer,
    ServerFigures,
    ServerHealth,
    Times,
)
from charonia.gateway.upstream import Upstream, states_of
from charonia_client import Load


async def health(
    upstream: Upstream, fallback: Upstream | None, *, is_draining: bool, says_live: bool
) -> Health:
    """Describe each server, and whether the gateway and one server would take a request now.

    Args:
        fallback: the servers of the fallback model.
        says_live: whether the answer says that this process works.
    """
    live = True if says_live else UNSET
    if is_draining:
        return Health(live=live, status="draining")
    own = len(upstream.servers)
    asked = [*upstream.servers, *(fallback.servers if fallback is not None else ())]
    servers = [
        ServerHealth(
            server.url,
            (trouble := server.trouble(state)) is None,
            trouble,
            UNSET if number < own else True,
        )
        for number, (server, state) in enumerate(zip(asked, await states_of(asked), strict=True))
    ]
    is_ready = any(one.ready for one in servers)
    return Health(live=live, status="ready" if is_ready else "not ready", servers=servers)


async def metrics(upstream: Upstream, figures: Figures, num_in_flight: int) -> MetricsAnswer:
    """Sum up the answers of this gateway, and the load of its servers.

    Servers of the fallback model are left out, although its answers count.
    """
    states = await upstream.states()
    servers = [
        ServerFigures(
            server.url,
            (trouble := server.trouble(state)) is None,
            trouble,
            None if state is None else state.load,
        )
        for server, state in zip(upstream.servers, states, strict=True)
    ]
    loads = [one.load for one in servers if one.load is not None]
    ttft_s, latency_s = figures.ttft_s, figures.latency_s
    return MetricsAnswer(
        total_requests=figures.num_answers,
        total_tokens_generated=figures.num_tokens,
        avg_latency_ms=None if latency_s is None else 1000 * latency_s,
        avg_throughput_tokens_per_sec=figures.throughput,
        cache_hit_rate=_rate(loads, "cache_hit_tokens", "cache_queried_tokens"),
        acceptance_rate=_rate(loads, "accepted_tokens", "draft_tokens"),
        uptime_s=figures.uptime_s,
        requests_in_flight=num_in_flight,
        tokens_per_sec=figures.tokens_per_s,
        ttft_ms=None if ttft_s is None else Times(1000 * ttft_s[0], 1000 * ttft_s[1]),
        servers=servers,
    )


def _rate(loads: list[Load], part: str, whole: str) -> float | None:
    """A share of all servers' counts; None where there is nothing to have a share of."""
    total = sum(getattr(load, whole) for load in loads)
    return sum(getattr(load, part) for load in loads) / total if total else None
