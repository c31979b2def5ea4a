"""What a row computes in a step, and who is preempted for its blocks."""

from collections import deque

from charonia.control import FixedDepth, KVPool, Scheduler, Speculation
from support.echo import EchoDrafter, echo_run
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


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    engine = make_engine(scheduler)
    scheduler.add(make_request("a", 20, max_tokens=1))
    chunks = [run_step(scheduler, engine)[0].rows[0].num_tokens for _ in range(3)]
    assert chunks == [8, 8, 4]


def test_without_chunking_a_prompt_waits_for_a_step_with_room():
    scheduler = make_scheduler(enable_chunked_prefill=False)
    engine = make_engine(scheduler)
    scheduler.add(make_request("a", 40, token_ids=[1] * 40))
    scheduler.add(make_request("b", 30, token_ids=[2] * 30))
    plan, _ = run_step(scheduler, engine)
    assert [row.num_tokens for row in plan.rows] == [40]


def test_the_victim_of_a_preemption_is_the_last_in_order_and_comes_back_first():
    scheduler = make_scheduler(num_blocks=9)
    engine = make_engine(scheduler)
    for key in "abc":
        scheduler.add(make_request(key, 7, token_ids=[ord(key)] * 7, max_tokens=20))
    outputs = run_to_end(scheduler, engine)
    assert scheduler.stats.preemptions > 0
    for key, output in outputs.items():
        assert output == echo_run([ord(key)] * 7, seed=1, max_tokens=20, vocab_size=256)


def test_rows_are_shared_out_evenly_among_the_steps_in_flight():
    scheduler = make_scheduler(num_stages=2, max_num_seqs=8, num_blocks=65)
    engine = make_engine(scheduler)
    add_requests(scheduler, "abcdefg")
    in_flight = deque(plan_all(scheduler))
    sizes = []
    for _ in range(8):
        plan = in_flight.popleft()
        sizes.append(len(plan.rows))
        scheduler.apply(engine.submit(plan).result(None), 0.0)
        in_flight.append(scheduler.plan(0.0))
    assert sizes == [4, 3] * 4


def test_who_needs_blocks_of_a_request_in_flight_waits_for_its_step():
    scheduler = make_scheduler(num_stages=2, num_blocks=9)
    engine = make_engine(scheduler)
    add_requests(scheduler, "ab", 11)
    in_flight = deque(plan_all(scheduler))
    while True:
        scheduler.apply(engine.submit(in_flight.popleft()).result(None), 0.0)
        check_invariants(scheduler)
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        in_flight.append(plan)
    first, last = scheduler.requests
    assert (first.num_in_flight, last.num_in_flight) == (False, True)
    assert scheduler.stats.preemptions == 0
    scheduler.apply(engine.submit(in_flight.popleft()).result(None), 0.0)
    plan = scheduler.plan(0.0)
    assert [row.row for row in plan.rows] == [first.row]
    assert (first.num_preemptions, last.num_preemptions) == (0, 1)


def test_what_a_client_guesses_is_verified_with_its_prompt_and_then_while_it_is_right():
    speculation = Speculation(max_drafts=3, policy=FixedDepth(), drafter=EchoDrafter(64))
    scheduler = Scheduler(LIMITS, KVPool(b"test"), speculation=speculation)
    engine = make_engine(scheduler)
    answer = echo_run([0, 1, 2], seed=1, max_tokens=12, vocab_size=engine.vocab_size)
    wrong = [*answer[:6], (answer[6] + 1) % engine.vocab_size, *answer[7:]]
    request = make_request("a", 3, max_tokens=12, expected_ids=deque(wrong))
    scheduler.add(request)
    drafted = []
    while (plan := scheduler.plan(0.0)) is not None:
        (row,) = plan.rows
        drafted.append((row.num_tokens, row.draft_ids))
        scheduler.apply(engine.submit(plan).result(None), 0.0)
    assert drafted[0] == (3, answer[:3])
    assert drafted[1] == (1, wrong[4:7])
    assert all(draft_ids != wrong[7:10] for _, draft_ids in drafted[2:])
    assert request.token_ids[3:] == answer
