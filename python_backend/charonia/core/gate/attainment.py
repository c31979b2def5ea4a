"""What each tenant got of the server, and whether it was what was promised.

Owns which end of a request counts as what, and what was computed for whom. Must not know
how requests are served.

A request that its client cancelled says nothing of what was promised. One that ended with an error
before its first token has missed the target for that, and so has one that was refused: clients see
no difference. Only a refusal of which the client or its tenant is the cause says nothing.
"""

from dataclasses import dataclass

from charonia.core.gate.tenants import Tenants
from charonia.metrics.metrics import Metrics

_FINISHED = ("stop", "length")
_CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """A request that was accepted and is over.

    Attributes:
        reason: "stop", "length", or the kind of its error.
        first_token_s: from its arrival; None where there was no token.
        inter_token_s: in the mean of its tokens after the first; None without such.
        has_deadline: whether it had a `deadline_ms`.
    """

    tenant: str
    reason: str
    first_token_s: float | None = None
    inter_token_s: float | None = None
    has_deadline: bool = False


class Attainment:
    """Counts by tenant: the ends of requests, and what was computed."""

    def __init__(self, tenants: Tenants, metrics: Metrics) -> None:
        self._tenants = tenants
        self._metrics = metrics

    def note_end(self, end: RequestEnd) -> None:
        """Count a request that is over."""
        args, label = self._tenants.of(end.tenant), self._tenants.label_of(end.tenant)
        self._metrics.count("charonia_tenant_requests_total", 1, label)
        if end.reason == _CANCELLED:
            return
        if end.has_deadline:
            self._count("charonia_deadline", label, is_met=end.reason in _FINISHED)
        if args.ttft_target_ms is not None:
            first_s = end.first_token_s
            is_met = first_s is not None and 1000 * first_s <= args.ttft_target_ms
            self._count("charonia_ttft_target", label, is_met=is_met)
        if args.inter_token_target_ms is not None and end.inter_token_s is not None:
            is_met = 1000 * end.inter_token_s <= args.inter_token_target_ms
            self._count("charonia_inter_token_target", label, is_met=is_met)

    def note_computed(self, tenant: str, num_prompt: int, num_tokens: int) -> None:
        """Count what was computed for a tenant, be it for one request or for several.

        Args:
            num_prompt: tokens of the prompt, which count where any were generated.
            num_tokens: that were generated, of all samples.
        """
        label = self._tenants.label_of(tenant)
        self._metrics.count("charonia_tenant_generation_tokens_total", num_tokens, label)
        if num_tokens:
            self._metrics.count("charonia_tenant_prompt_tokens_total", num_prompt, label)

    def note_refusal(self, tenant: str, *, has_deadline: bool) -> None:
        """Count a request that was refused, and not by its client's doing."""
        label = self._tenants.label_of(tenant)
        if has_deadline:
            self._count("charonia_deadline", label, is_met=False)
        if self._tenants.of(tenant).ttft_target_ms is not None:
            self._count("charonia_ttft_target", label, is_met=False)

    def _count(self, what: str, label: str, *, is_met: bool) -> None:
        self._metrics.count(f"{what}_{'met' if is_met else 'missed'}_total", 1, label)
