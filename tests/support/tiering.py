"""Schedulers with slower tiers on the echo engine, and what their plans save and load."""

from charonia.protocol import BlockLoad, BlockSave, StepPlan
from support.stepping import Bench, make_request

NUM_BLOCKS = 40


def make_bench(*tier_sizes: int, **changes) -> Bench:
    values = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 4, "max_model_len": 160} | changes
    return Bench(tier_sizes=tier_sizes or (100,), **values)


def make_prompt(key: str, token_id: int = 7, **changes):
    """Eight full blocks of four tokens, and two tokens more."""
    values = {"token_ids": [token_id] * 34, "max_tokens": 2} | changes
    return make_request(key, **values)


def run(bench: Bench, *requests) -> list[StepPlan]:
    """Step until the requests have ended and nothing is to be moved."""
    bench.add(*requests)
    plans = []
    while (plan := bench.scheduler.plan(0.0)) is not None:
        bench.scheduler.apply(bench.engine.submit(plan).result(None), 0.0)
        plans.append(plan)
    assert not bench.scheduler.requests
    return plans


def wash_out(bench: Bench) -> list[StepPlan]:
    """Have everything evicted by what nobody will hit."""
    return run(bench, make_request("z", token_ids=list(range(100, 250)), max_tokens=6))


def saves_of(plans: list[StepPlan]) -> list[BlockSave]:
    return [save for plan in plans for save in plan.saves]


def loads_of(plans: list[StepPlan]) -> list[BlockLoad]:
    return [load for plan in plans for load in plan.loads]


def fill(bench: Bench) -> None:
    """Have a tier hold the eight blocks of the prompt, and the cache none of them."""
    run(bench, make_prompt("a"))
    run(bench, make_prompt("b"))
    wash_out(bench)
