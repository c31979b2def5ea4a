"""What the scheduler decides by, as the configuration asks for it.

Owns the choice. Must not know what any of it does.
"""

from collections.abc import Callable

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Limits, PeakMemory, Policy, PromptBudget, StepSize
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
        deadlines = DeadlineWatch(engine_args.most_step_tokens, demotes=demotes)
    if scheduler_args.fair_share:
        return fair(rank, weight_of, displacement, deadlines)
    return ranked(rank, displacement, deadlines)


def make_prompt_budget(
    engine_args: EngineArgs, scheduler_args: SchedulerArgs
) -> PromptBudget | None:
    """Set up the budget of prompts of one scheduler; None where they take all that fits."""
    target_ms = scheduler_args.inter_token_target_ms
    if target_ms is None or not engine_args.enable_chunked_prefill:
        return None
    return PromptBudget(None if target_ms == "auto" else target_ms / 1000)


def make_peak_memory(scheduler_args: SchedulerArgs) -> PeakMemory | None:
    """Set up the estimate of memory of one scheduler; None where nobody asks for it."""
    if scheduler_args.capacity_scheduler_policy == "max_utilization":
        return None
    return PeakMemory(expects=scheduler_args.capacity_scheduler_policy == "expected_peak")


def make_step_size(
    engine_args: EngineArgs, scheduler_args: SchedulerArgs, limits: Limits
) -> StepSize | None:
    """Set up the choice of a step's size of one scheduler; None where both sizes are fixed."""
    adapts_rows = engine_args.max_num_seqs == "auto"
    adapts_tokens = engine_args.max_num_batched_tokens == "auto"
    if not (adapts_rows or adapts_tokens):
        return None
    target_ms = scheduler_args.inter_token_target_ms
    return StepSize(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        adapts_rows=adapts_rows,
        adapts_tokens=adapts_tokens,
        target_s=None if target_ms is None or target_ms == "auto" else target_ms / 1000,
    )
