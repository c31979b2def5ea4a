"""A scheduler with an echoing engine, stepped by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from charonia.control import (
    KVPool,
    Limits,
    PeakMemory,
    Policy,
    PrefixSharing,
    Request,
    Scheduler,
    SchedulerStats,
    Speculation,
    StepSize,
    Tiers,
)
from charonia.control.cache.eviction import Eviction, Lru
from charonia.control.scheduling.prompt_budget import PromptBudget
from charonia.protocol import RowSampling, StepPlan
from support.echo import EchoExecutor
from support.invariants import check_invariants

LIMITS = Limits(
    num_blocks=17, block_size=4, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64
)


def make_request(key: str, priority: int = 0, **changes) -> Request:
    """A prompt of 8 tokens, all the key's first character, and 8 tokens to generate."""
    values = {
        "key": key,
        "token_ids": [ord(key[0])] * 8,
        "sampling": RowSampling(seed=1),
        "max_tokens": 8,
        "stop_ids": frozenset(),
        "arrived_at": 0.0,
        "priority": priority,
    } | changes
    return Request(num_prompt=len(values["token_ids"]), **values)


class Bench:
    """A scheduler with its engine."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        speculation: Speculation | None = None,
        prompt_budget: PromptBudget | None = None,
        peak_memory: PeakMemory | None = None,
        step_size: StepSize | None = None,
        sharing: PrefixSharing | None = None,
        eviction: Callable[[int], Eviction] = Lru,
        cache_weight_of: Callable[[str], float] | None = None,
        vocab_size: int = 256,
        tier_sizes: Sequence[int] = (),
        **limits,
    ) -> None:
        limits = replace(LIMITS, **limits)
        self.engine = EchoExecutor(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            vocab_size=vocab_size,
            tier_sizes=tier_sizes,
        )
        stats = SchedulerStats()
        self.scheduler = Scheduler(
            limits,
            KVPool(b"test", eviction=eviction, weight_of=cache_weight_of),
            stats=stats,
            policy=policy,
            speculation=speculation,
            prompt_budget=prompt_budget,
            peak_memory=peak_memory,
            step_size=step_size,
            sharing=sharing,
            tiers=self.tiers(stats),
        )

    def tiers(self, stats: SchedulerStats) -> Tiers | None:
        """Make the slower tiers of what the engine keeps at this moment."""
        kept = self.engine.info().kept
        return None if kept is None else Tiers(kept, stats)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self, now: float = 0.0) -> StepPlan:
        plan = self.scheduler.plan(now)
        assert plan is not None
        check_invariants(self.scheduler)
        self.scheduler.apply(self.engine.submit(plan).result(None), now)
        check_invariants(self.scheduler)
        return plan

    @property
    def running(self) -> set[str]:
        return {one.key for one in self.scheduler.requests if one.row is not None}

    def ends(self) -> list[str]:
        """Run to the end; the keys in the order of their ends."""
        ended: list[str] = []
        while live := {one.key for one in self.scheduler.requests}:
            self.step()
            ended += sorted(live - {one.key for one in self.scheduler.requests})
        return ended
