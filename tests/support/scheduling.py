"""A scheduler and an echoing engine side by side, for tests that look in between."""

from dataclasses import replace

from charonia.control import KVPool, Limits, Request, Scheduler
from charonia.protocol import RowSampling, StepPlan
from support.echo import EchoExecutor
from support.invariants import check_invariants

LIMITS = Limits(
    num_blocks=17, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64
)


def make_scheduler(**changes) -> Scheduler:
    return Scheduler(replace(LIMITS, **changes), KVPool(b"test"))


def make_request(key: str, num_prompt: int = 8, **changes) -> Request:
    values = {
        "key": key,
        "token_ids": list(range(num_prompt)),
        "num_prompt": num_prompt,
        "sampling": RowSampling(seed=1, min_tokens=changes.pop("min_tokens", 0)),
        "max_tokens": 8,
        "stop_ids": frozenset(),
        "arrived_at": 0.0,
    } | changes
    return Request(**values)


def make_engine(scheduler: Scheduler, **changes) -> EchoExecutor:
    limits = scheduler.limits
    return EchoExecutor(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        **changes,
    )


def run_step(scheduler: Scheduler, engine: EchoExecutor, now: float = 0.0):
    plan = scheduler.plan(now)
    updates = scheduler.apply(engine.submit(plan).result(None), now)
    check_invariants(scheduler)
    return plan, updates


def run_to_end(scheduler: Scheduler, engine: EchoExecutor) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    while scheduler.requests:
        for update in run_step(scheduler, engine)[1]:
            outputs.setdefault(update.request.key, []).extend(update.token_ids)
    return outputs


def add_requests(scheduler: Scheduler, keys: str, num_prompt: int = 8, **changes) -> None:
    for key in keys:
        scheduler.add(make_request(key, num_prompt, token_ids=[ord(key)] * num_prompt, **changes))


def plan_all(scheduler: Scheduler) -> list[StepPlan]:
    """Plan until nothing more can be in flight, from nothing in flight."""
    plans = []
    while len(plans) < scheduler.limits.max_steps_in_flight:
        plan = scheduler.plan(0.0)
        check_invariants(scheduler)
        if plan is None:
            break
        plans.append(plan)
    return plans
