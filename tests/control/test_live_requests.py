"""How requests end: by a token, in the middle of a step, beside one."""

from support.echo import echo_run
from support.invariants import check_invariants
from support.scheduling import (
    add_requests,
    make_engine,
    make_request,
    make_scheduler,
    plan_all,
    run_to_end,
)


def test_a_stop_token_counts_only_after_min_tokens():
    prompt = list(range(8))
    tokens = echo_run(prompt, seed=1, max_tokens=8, vocab_size=256)
    for min_tokens, expected in ((0, 3), (4, 8)):
        scheduler = make_scheduler()
        engine = make_engine(scheduler)
        request = make_request("a", stop_ids=frozenset({tokens[2]}), min_tokens=min_tokens)
        scheduler.add(request)
        assert len(run_to_end(scheduler, engine)["a"]) == expected


def test_blocks_of_a_request_that_ends_during_a_step_are_free_after_it_and_not_before():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b", token_ids=[9] * 8))
    plan = scheduler.plan(0.0)
    assert [row.num_tokens for row in plan.rows] == [8, 8]
    assert scheduler.finish("a") is not None
    assert scheduler.finish("a") is None
    assert scheduler.kv.num_used == 4
    updates = scheduler.apply(engine.submit(plan).result(None), 0.0)
    assert [update.request.key for update in updates] == ["b"]
    assert scheduler.kv.num_used == 2
    assert scheduler.finish("unknown") is None


def test_who_is_in_no_step_is_gone_as_soon_as_it_ends_whatever_is_in_flight():
    scheduler = make_scheduler(max_num_seqs=1)
    for key in "ab":
        scheduler.add(make_request(key))
    scheduler.plan(0.0)
    for key in "ab":
        scheduler.finish(key)
    check_invariants(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.kv.num_used > 0  # the step writes there


def test_a_request_that_ends_in_flight_leaves_with_its_own_step():
    scheduler = make_scheduler(num_stages=2)
    engine = make_engine(scheduler)
    add_requests(scheduler, "ab")
    first, second = plan_all(scheduler)
    for key in "ab":
        scheduler.finish(key)
    assert scheduler.kv.num_used == 4
    for plan, num_used in ((first, 2), (second, 0)):
        assert scheduler.apply(engine.submit(plan).result(None), 0.0) == []
        check_invariants(scheduler)
        assert scheduler.kv.num_used == num_used


def test_a_request_that_ends_beside_the_steps_in_flight_is_not_planned_again():
    scheduler = make_scheduler(num_stages=2)
    engine = make_engine(scheduler)
    add_requests(scheduler, "abc")
    first, _ = plan_all(scheduler)
    scheduler.apply(engine.submit(first).result(None), 0.0)
    a_row, b_row = (row.row for row in first.rows)
    scheduler.finish("a")
    plan = scheduler.plan(0.0)
    check_invariants(scheduler)
    assert (plan.leaves, [row.row for row in plan.rows]) == ([a_row], [b_row])
