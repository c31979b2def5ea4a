"""Who gets a row, and what is counted of it."""

from dataclasses import replace

from charonia.control import KVPool, Scheduler
from charonia.control.policies import DisplacementByPriority, by_priority, ranked
from support.echo import EchoExecutor
from support.invariants import check_invariants
from support.scheduling import (
    LIMITS,
    add_requests,
    make_engine,
    make_request,
    make_scheduler,
    plan_all,
    run_step,
    run_to_end,
)


def test_admission_counts_blocks_that_admitted_prompts_still_need():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    engine = make_engine(scheduler)
    scheduler.add(make_request("a", 40, token_ids=[1] * 40, max_tokens=2))
    scheduler.add(make_request("b", 24, token_ids=[2] * 24, max_tokens=2))
    for _ in range(5):
        run_step(scheduler, engine)
        assert scheduler.stats.preemptions == 0
    assert run_to_end(scheduler, engine).keys() == {"a", "b"}
    assert scheduler.stats.preemptions == 0


def test_a_hit_on_a_free_block_counts_against_capacity():
    scheduler = make_scheduler(num_blocks=9)
    engine = make_engine(scheduler)
    scheduler.add(make_request("a", 16, max_tokens=1))
    run_to_end(scheduler, engine)
    scheduler.add(make_request("b", 13, token_ids=[99] * 13, max_tokens=8))
    run_step(scheduler, engine)
    # 4 of 8 blocks are b's. c hits 4 free ones: they are its capacity, not spare.
    scheduler.add(make_request("c", 17, token_ids=[*range(16), 5], max_tokens=1))
    plan, _ = run_step(scheduler, engine)
    assert plan.joins == []


def test_a_row_that_is_alone_leaves_the_other_step_to_those_that_join():
    scheduler = make_scheduler(num_stages=2)
    add_requests(scheduler, "a")
    assert len(plan_all(scheduler)) == 1
    add_requests(scheduler, "b")
    plan = scheduler.plan(0.0)
    assert [join.token_ids[0] for join in plan.joins] == [ord("b")]


def test_those_that_find_no_blocks_do_not_make_the_steps_of_others_larger():
    scheduler = make_scheduler(num_stages=2, num_blocks=9)
    engine = make_engine(scheduler)
    add_requests(scheduler, "abcdef", 12)
    (plan,) = plan_all(scheduler)
    assert (len(plan.rows), scheduler.num_waiting) == (2, 4)
    scheduler.apply(engine.submit(plan).result(None), 0.0)
    assert [len(plan.rows) for plan in plan_all(scheduler)] == [1, 1]


def test_who_displaces_one_of_two_with_the_same_blocks_begins_with_those_of_the_other():
    rank = by_priority()
    limits = replace(LIMITS, max_num_seqs=2, async_scheduling=True)
    policy = ranked(rank, DisplacementByPriority(rank))
    scheduler = Scheduler(limits, KVPool(b"test"), policy=policy)
    engine = make_engine(scheduler)
    plans = []
    for priority in (2, 1):  # neither finds what the other one computes
        scheduler.add(make_request(f"{priority}", 9, priority=priority))
        plans.append(scheduler.plan(0.0))
    for plan in plans:
        scheduler.apply(engine.submit(plan).result(None), 0.0)
    requests = {request.key: request for request in scheduler.requests}
    other = list(requests["1"].block_ids)
    assert scheduler.kv.find(requests["2"].block_keys) == requests["2"].block_ids[:2]
    urgent = make_request("0", 9)
    scheduler.add(urgent)
    run_step(scheduler, engine)
    check_invariants(scheduler)
    assert requests["2"].row is None
    assert urgent.block_ids[:2] == other[:2]
    run_to_end(scheduler, engine)


def test_a_probe_is_in_no_count_of_tokens():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", is_probe=True))
    run_to_end(scheduler, EchoExecutor(block_size=LIMITS.block_size))
    assert scheduler.stats.prompt_tokens_computed == 0
    assert scheduler.stats.prefix_queried_tokens == 0
