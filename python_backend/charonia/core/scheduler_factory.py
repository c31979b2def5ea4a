"""Makes the scheduler and its policies from the configuration.

Owns the choice of the parts. Must not know how they work.
"""

from collections.abc import Callable
from functools import partial

from charonia.config import EngineArgs, SchedulerArgs, SpeculativeConfig
from charonia.control import (
    AdaptiveDepth,
    CacheEvents,
    Drafter,
    FixedDepth,
    KVPool,
    Limits,
    NgramDrafter,
    PeakMemory,
    Policy,
    PrefixSharing,
    PromptBudget,
    Scheduler,
    SchedulerStats,
    Speculation,
    StepSize,
    SuffixDrafter,
    Tiers,
)
from charonia.control.cache import BlockHasher
from charonia.control.cache.eviction import EVICTIONS
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
from charonia.core.recording.journal import Journal
from charonia.core.recording.journaled_scheduler import JournaledScheduler
from charonia.protocol import EngineInfo


def make_scheduler(
    engine_args: EngineArgs,
    scheduler_args: SchedulerArgs,
    limits: Limits,
    *,
    hash_secret: bytes,
    epoch: int,
    stats: SchedulerStats,
    weight_of: Callable[[str], float],
    cache_events: CacheEvents | None,
    tiers: Tiers | None,
    journal: Journal | None = None,
) -> Scheduler:
    """Set up the scheduler of one engine.

    Args:
        hash_secret, cache_events: see `KVPool`. epoch, stats, tiers: see `Scheduler`.
        weight_of: returns a tenant's weight, for fair shares of the engine and of the cache.
        journal: records the scheduler's calls; None records nothing.
    """
    new: Callable[..., Scheduler] = Scheduler
    if journal is not None:
        new = partial(JournaledScheduler, journal, engine_args, scheduler_args)
        weight_of = journal.weighing(weight_of)
    pool = KVPool(
        hash_secret,
        eviction=EVICTIONS[engine_args.eviction_policy],
        events=cache_events,
        weight_of=weight_of if scheduler_args.fair_share else None,
        new_hasher=BlockHasher if journal is None else journal.new_hasher,
    )
    return new(
        limits,
        pool,
        epoch=epoch,
        stats=stats,
        speculation=_speculation(engine_args.speculative_config),
        policy=policy_of(engine_args, scheduler_args, weight_of),
        prompt_budget=_prompt_budget(engine_args, scheduler_args),
        peak_memory=_peak_memory(scheduler_args),
        step_size=_step_size(engine_args, scheduler_args, limits),
        sharing=_prefix_sharing(engine_args),
        tiers=tiers,
    )


def limits_of(info: EngineInfo, args: EngineArgs, log: Callable[[str], None]) -> Limits:
    """Limits that requests of an engine must keep."""
    limits = Limits.of_engine(
        info,
        async_scheduling=args.async_scheduling,
        enable_prefix_caching=args.enable_prefix_caching,
        enable_chunked_prefill=args.enable_chunked_prefill,
    )
    if limits.max_model_len < info.max_model_len:
        log(
            f"warning: max_model_len is lowered from {info.max_model_len} to "
            f"{limits.max_model_len}: the KV cache has {info.num_blocks - 1} blocks of "
            f"{info.kv.block_size} tokens"
        )
    return limits


def rank_of(engine_args: EngineArgs, scheduler_args: SchedulerArgs) -> RankOf:
    """The order of requests; with fair shares, of each tenant's requests."""
    if engine_args.scheduling_policy == "priority":
        return by_priority(scheduler_args.priority_aging_s)
    return by_deadline if engine_args.scheduling_policy == "deadline" else by_arrival


def rejects_late(engine_args: EngineArgs, scheduler_args: SchedulerArgs) -> bool:
    """Return whether waiting requests end as soon as they cannot meet their deadlines."""
    is_by_deadline = engine_args.scheduling_policy == "deadline"
    return is_by_deadline and scheduler_args.late_requests == "reject"


def policy_of(
    engine_args: EngineArgs, scheduler_args: SchedulerArgs, weight_of: Callable[[str], float]
) -> Policy:
    """Set up the policy of one scheduler.

    Args:
        weight_of: returns a tenant's weight, for fair shares.
    """
    rank = rank_of(engine_args, scheduler_args)
    displacement: Displacement | None = None
    deadlines: Deadlines | None = None
    if engine_args.scheduling_policy == "priority":
        displacement = DisplacementByPriority(rank)
    elif engine_args.scheduling_policy == "deadline":
        displacement = DisplacementByDeadline()
        deadlines = DeadlineWatch(demotes=not rejects_late(engine_args, scheduler_args))
    if scheduler_args.fair_share:
        return fair(rank, weight_of, displacement, deadlines)
    return ranked(rank, displacement, deadlines)


def _speculation(config: SpeculativeConfig | None) -> Speculation | None:
    """The speculation that is configured; None without."""
    if config is None:
        return None
    drafter: Drafter | None = None
    if config.method == "ngram":
        drafter = NgramDrafter(*config.prompt_lookup)
    elif config.method == "suffix":
        drafter = SuffixDrafter()
    has_draft_model = config.has_draft_model
    return Speculation(
        max_drafts=config.max_drafts,
        policy=AdaptiveDepth(has_draft_model=has_draft_model) if config.adaptive else FixedDepth(),
        drafter=drafter,
    )


def _prompt_budget(engine_args: EngineArgs, scheduler_args: SchedulerArgs) -> PromptBudget | None:
    """The budget of prompt chunks; None if prompts may fill a step."""
    target_ms = scheduler_args.inter_token_target_ms
    if target_ms is None or not engine_args.enable_chunked_prefill:
        return None
    return PromptBudget(None if target_ms == "auto" else target_ms / 1000)


def _peak_memory(scheduler_args: SchedulerArgs) -> PeakMemory | None:
    if scheduler_args.capacity_scheduler_policy == "max_utilization":
        return None
    return PeakMemory(expects=scheduler_args.capacity_scheduler_policy == "expected_peak")


def _prefix_sharing(args: EngineArgs) -> PrefixSharing | None:
    if not (args.enable_prefix_caching and args.enable_prefix_sharing):
        return None
    return PrefixSharing()


def _step_size(
    engine_args: EngineArgs, scheduler_args: SchedulerArgs, limits: Limits
) -> StepSize | None:
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
