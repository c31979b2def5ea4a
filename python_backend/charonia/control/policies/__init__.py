"""Who comes first: among the waiting, among the running, and between the two.

    waiting ── WaitingOrder: in which order they are offered rows and blocks
       │                     Displacement: which of them may take those of a running one
       ▼
    running ── RunningOrder: who keeps what it has when tokens, rows or blocks run out
                             Service: takes note of what they are given, where that matters
                             Deadlines: which of those that wait will be late

They combine freely, and each compares O(log n) requests per change. Must not know rows, blocks or
steps.
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
