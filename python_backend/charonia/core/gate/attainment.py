"""Service of each tenant, and attainment of its targets.

Owns the counts of requests' ends and of computed tokens. Must not know how requests are
served.

A cancelled request does not count for the targets. A request that ended with an error before its
first token has missed the target for the first token. So has a refused request: clients see no
difference. A refusal does not count if the client or its tenant is the cause.
"""

from typing import Protocol

from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.metrics.metrics import Metrics

_FINISHED = ("stop", "length")
_CANCELLED = "cancelled"


class LiveEntry(Protocol):
    """An accepted request, as far as its end is counted.

    Attributes:
        number: its number among those that were added with it, from 1; 0 before that.
    """

    number: int

    @property
    def request(self) -> GenerationRequest:
        """The client's request."""
        ...

    @property
    def arrived_at(self) -> float:
        """Time of its arrival, in seconds."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of all its samples so far."""
        ...

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its arrival to its first token; None without one."""
        ...

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between its tokens; None with fewer than two."""
        ...

    def queue_s(self, now: float) -> float:
        """Seconds from its arrival to its first step; without one, until now."""
        ...


class Attainment:
    """Counts the ends of requests and the computed tokens, by tenant."""

    def __init__(self, tenants: Tenants, metrics: Metrics) -> None:
        self._tenants = tenants
        self._metrics = metrics

    def note_end(self, entry: LiveEntry, reason: str, now: float) -> None:
        """Count the end of a request, the only place where one is counted.

        Args:
            reason: "stop", "length", or the kind of its error.
        """
        params = entry.request.params
        self._metrics.count_end(
            reason,
            queue_s=entry.queue_s(now),
            total_s=now - entry.arrived_at,
            num_prompt=len(entry.request.prompt_ids),
            num_tokens=entry.num_tokens,
            n=params.n,
        )
        args, label = self._tenants.of(params.tenant), self._tenants.label_of(params.tenant)
        self._metrics.count("charonia_tenant_requests_total", 1, label)
        if reason == _CANCELLED:
            return
        if params.deadline_ms is not None:
            self._count("charonia_deadline", label, is_met=reason in _FINISHED)
        if args.ttft_target_ms is not None:
            first_s = entry.first_token_s
            is_met = first_s is not None and 1000 * first_s <= args.ttft_target_ms
            self._count("charonia_ttft_target", label, is_met=is_met)
        inter_s = entry.inter_token_s
        if args.inter_token_target_ms is not None and inter_s is not None:
            is_met = 1000 * inter_s <= args.inter_token_target_ms
            self._count("charonia_inter_token_target", label, is_met=is_met)

    def note_computed(self, tenant: str, num_prompt: int, num_tokens: int) -> None:
        """Count the tokens that were computed for a tenant, for one request or a shared one.

        Args:
            num_prompt: tokens of the prompt; counted only if any tokens were generated.
            num_tokens: generated tokens of all samples.
        """
        label = self._tenants.label_of(tenant)
        self._metrics.count("charonia_tenant_generation_tokens_total", num_tokens, label)
        if num_tokens:
            self._metrics.count("charonia_tenant_prompt_tokens_total", num_prompt, label)

    def note_refusal(self, tenant: str, *, has_deadline: bool) -> None:
        """Count a refused request, if the client is not the cause."""
        label = self._tenants.label_of(tenant)
        if has_deadline:
            self._count("charonia_deadline", label, is_met=False)
        if self._tenants.of(tenant).ttft_target_ms is not None:
            self._count("charonia_ttft_target", label, is_met=False)

    def _count(self, what: str, label: str, *, is_met: bool) -> None:
        self._metrics.count(f"{what}_{'met' if is_met else 'missed'}_total", 1, label)
