"""What each tenant received, and whether its targets were met.

Owns how the ends of requests and the computed tokens are counted. Must not know how requests are
served.

A cancelled request does not count for the targets. A request that ended with an error before its
first token has missed the target for the first token. So has a refused request: clients see no
difference. A refusal does not count if the client or its tenant is the cause.
"""

from dataclasses import dataclass

from charonia.core.gate.tenants import Tenants
from charonia.metrics.metrics import Metrics

_FINISHED = ("stop", "length")
_CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """The end of an accepted request.

    Attributes:
        reason: "stop", "length", or the kind of its error.
        queue_s: seconds from its arrival to its first step, or its end. total_s: to its end.
        num_prompt: tokens of its prompt. num_tokens: generated tokens of all samples.
        n: completions that it asked for.
        first_token_s: from its arrival to its first token; None without one.
        inter_token_s: mean time between its tokens; None with fewer than two.
        has_deadline: whether it had a `deadline_ms`.
    """

    tenant: str
    reason: str
    queue_s: float
    total_s: float
    num_prompt: int
    num_tokens: int
    n: int
    first_token_s: float | None = None
    inter_token_s: float | None = None
    has_deadline: bool = False


class Attainment:
    """Counts the ends of requests and the computed tokens, by tenant."""

    def __init__(self, tenants: Tenants, metrics: Metrics) -> None:
        self._tenants = tenants
        self._metrics = metrics

    def note_end(self, end: RequestEnd) -> None:
        """Count the end of a request, the only place where one is counted."""
        self._metrics.count_end(
            end.reason,
            queue_s=end.queue_s,
            total_s=end.total_s,
            num_prompt=end.num_prompt,
            num_tokens=end.num_tokens,
            n=end.n,
        )
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
