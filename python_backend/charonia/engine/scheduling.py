"""The scheduling policy as the configuration asks for it.

Owns the choice. Must not know what a policy does.
"""

from collections.abc import Callable

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Policy
from charonia.control.policies import (
    Deadlines,
    DeadlineWatch,
    Displacement,
    DisplacementByDeadline,
    DisplacementByPriority,
    RankOf,
    by_arrival,
    by_deadline,
    by_priority,
    fair,
    ranked,
)


def make_policy(
    engine_args: EngineArgs,
    scheduler_args: SchedulerArgs,
    weight_of: Callable[[str], float] = lambda _: 1.0,
) -> Policy:
    """Set up the policy of one scheduler.

    Args:
        weight_of: of a tenant, for fair shares.
    """
    rank: RankOf = by_arrival
    displacement: Displacement | None = None
    deadlines: Deadlines | None = None
    if engine_args.scheduling_policy == "priority":
        rank = by_priority(scheduler_args.priority_aging_s)
        displacement = DisplacementByPriority(rank)
    elif engine_args.scheduling_policy == "deadline":
        rank, displacement = by_deadline, DisplacementByDeadline()
        demotes = scheduler_args.late_requests == "demote"
        deadlines = DeadlineWatch(engine_args.max_num_batched_tokens, demotes=demotes)
    if scheduler_args.fair_share:
        return fair(rank, weight_of, displacement, deadlines)
    return ranked(rank, displacement, deadlines)
