"""Scheduling policies: the order of waiting requests, of running requests, and between the two.

    waiting ── WaitingOrder: the order in which requests are offered rows and blocks
       │                     Displacement: which of them may preempt running requests
       ▼
    running ── RunningOrder: the order in which requests get tokens, and are preempted in reverse
                             Service: counts what requests are given, if the order depends on it
                             Deadlines: which waiting requests will be late

They combine freely, and each compares O(log n) requests per change. Knows nothing about rows,
blocks or steps.
"""

from charonia.control.policies.deadline import (
    DeadlineWatch,
    DisplacementByDeadline,
    by_deadline,
)
from charonia.control.policies.fair import fair
from charonia.control.policies.policy import (
    Deadlines,
    Displacement,
    Late,
    Policy,
    RunningOrder,
    Service,
    WaitingOrder,
)
from charonia.control.policies.ranked import (
    DisplacementByPriority,
    RankOf,
    by_arrival,
    by_priority,
    ranked,
)

__all__ = [
    "DeadlineWatch",
    "Deadlines",
    "Displacement",
    "DisplacementByDeadline",
    "DisplacementByPriority",
    "Late",
    "Policy",
    "RankOf",
    "RunningOrder",
    "Service",
    "WaitingOrder",
    "by_arrival",
    "by_deadline",
    "by_priority",
    "fair",
    "ranked",
]
