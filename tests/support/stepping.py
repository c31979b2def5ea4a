"""A scheduler with an echoing engine, stepped by hand."""

from dataclasses import replace

from charonia.control import (
    Limits,
    PeakMemory,
    Policy,
    Request,
    Scheduler,
    Speculation,
    StepSize,
)
from charonia.control.prompt_budget import PromptBudget
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
        vocab_size: int = 256,
        **limits,
    ) -> None:
        limits = replace(LIMITS, **limits)
        self.scheduler = Scheduler(
            limits,
            hash_secret=b"test",
            policy=policy,
            speculation=speculation,
            prompt_budget=prompt_budget,
            peak_memory=peak_memory,
            step_size=step_size,
        )
        self.engine = EchoExecutor(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            vocab_size=vocab_size,
        )

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
