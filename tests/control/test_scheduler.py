"""The scheduler's rules one by one: admission, preemption, caching, blame, overlap."""

from collections import deque
from dataclasses import replace

import pytest

from charonia.control import FixedDepth, Limits, Request, Scheduler, Speculation
from charonia.control.suspects import PROGRESS
from charonia.errors import ConfigError, EngineDiedError, InvalidRequestError
from charonia.protocol import RowSampling, StepPlan
from support.echo import EchoDrafter, EchoExecutor, echo_run
from support.invariants import check_invariants

LIMITS = Limits(
    num_blocks=17, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64
)


def make_scheduler(**changes) -> Scheduler:
    values = {name: getattr(LIMITS, name) for name in LIMITS.__slots__} | changes
    return Scheduler(Limits(**values), hash_secret=b"test")


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


# ---------------------------------------------------------------------- limits


def test_the_pool_bounds_the_length_of_a_request():
    info = EchoExecutor(num_blocks=5, block_size=16, max_model_len=4096).info()
    assert Limits.of_engine(info).max_model_len == 64


@pytest.mark.parametrize("num_tokens", [0, 64, 65])
def test_a_prompt_that_can_never_be_served_is_refused(num_tokens):
    with pytest.raises(InvalidRequestError, match=r"empty|at most 63"):
        make_scheduler().add(make_request("a", num_tokens))


def test_without_chunking_the_budget_must_hold_the_longest_prompt():
    with pytest.raises(ConfigError, match="max_num_batched_tokens = 32"):
        make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=32)


# ---------------------------------------------------------------------- planning


def test_the_first_plan_opens_an_epoch_and_the_next_ones_count_steps():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    scheduler.add(make_request("a"))
    first, _ = run_step(scheduler, engine)
    second, _ = run_step(scheduler, engine)
    assert (first.reset, first.step_id, second.reset, second.step_id) == (True, 0, False, 1)
    assert first.epoch == second.epoch == 1


def test_nothing_is_planned_without_requests():
    assert make_scheduler().plan(0.0) is None


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


def test_the_victim_of_a_preemption_is_the_last_in_order_and_comes_back_first():
    scheduler = make_scheduler(num_blocks=9)
    engine = make_engine(scheduler)
    for key in "abc":
        scheduler.add(make_request(key, 7, token_ids=[ord(key)] * 7, max_tokens=20))
    outputs = run_to_end(scheduler, engine)
    assert scheduler.stats.preemptions > 0
    for key, output in outputs.items():
        assert output == echo_run([ord(key)] * 7, seed=1, max_tokens=20, vocab_size=256)


# ---------------------------------------------------------------------- prefix cache


def test_a_second_request_starts_from_the_firsts_full_blocks_but_computes_its_last_token():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    for key in "ab":
        scheduler.add(make_request(key, 8, max_tokens=1))
        plan = scheduler.plan(0.0)
        scheduler.apply(engine.submit(plan).result(None), 0.0)
    assert plan.joins[0].num_computed == 4
    assert scheduler.stats.prompt_tokens_cached == 4


@pytest.mark.parametrize(
    "changes", [{"cache_scope": b"other"}, {"takes_hits": False}, {"enable": False}]
)
def test_no_hits_across_tenants_or_where_they_are_not_wanted(changes):
    scheduler = make_scheduler(enable_prefix_caching=changes.pop("enable", True))
    engine = make_engine(scheduler)
    scheduler.add(make_request("a", 16, max_tokens=1))
    run_to_end(scheduler, engine)
    scheduler.add(make_request("b", 16, max_tokens=1, **changes))
    plan, _ = run_step(scheduler, engine)
    assert plan.joins[0].num_computed == 0


def test_two_requests_that_computed_the_same_prefix_at_once_are_both_cached():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    scheduler.add(make_request("a", 9, max_tokens=1))
    scheduler.add(make_request("b", 9, max_tokens=1))
    run_step(scheduler, engine)
    assert scheduler.kv.num_cached == 4
    # Filling the pool evicts one copy after the other.
    scheduler.add(make_request("c", 60, token_ids=[7] * 60, max_tokens=1))
    run_to_end(scheduler, engine)
    assert scheduler.kv.num_used == 0


# ---------------------------------------------------------------------- endings


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


# ---------------------------------------------------------------------- failures


def test_a_reset_recomputes_every_request_from_its_tokens():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b", token_ids=[9] * 8))
    outputs = {"a": [], "b": []}
    for _ in range(3):
        for update in run_step(scheduler, engine)[1]:
            outputs[update.request.key] += update.token_ids
    scheduler.plan(0.0)
    scheduler.finish("b")
    scheduler.reset(epoch=7)
    check_invariants(scheduler)
    assert scheduler.num_waiting == 1
    plan = scheduler.plan(0.0)
    assert (plan.reset, plan.epoch) == (True, 8)
    assert plan.joins[0].token_ids == [*range(8), *outputs["a"]]


def test_the_request_that_kills_every_engine_is_found_and_the_others_finish():
    scheduler = make_scheduler()
    engine = make_engine(scheduler, poison=200, vocab_size=128)  # nobody generates 200
    scheduler.add(make_request("good"))
    scheduler.add(make_request("bad", token_ids=[200] * 8))
    scheduler.add(make_request("fine", token_ids=[3] * 8))
    outputs: dict[str, list[int]] = {}
    guilty = []
    num_deaths = 0
    while scheduler.requests:
        plan = scheduler.plan(0.0)
        try:
            result = engine.submit(plan).result(None)
        except EngineDiedError:
            num_deaths += 1
            culprit = scheduler.blame()
            guilty += [culprit.key] if culprit else []
            engine.restart()
            scheduler.reset()
            check_invariants(scheduler)
            continue
        for update in scheduler.apply(result, 0.0):
            outputs.setdefault(update.request.key, []).extend(update.token_ids)
        check_invariants(scheduler)
    assert guilty == ["bad"]
    assert num_deaths == 3
    for key, prompt in (("good", list(range(8))), ("fine", [3] * 8)):
        assert outputs[key] == echo_run(prompt, seed=1, max_tokens=8, vocab_size=128)


@pytest.mark.parametrize(
    ("num_tokens", "are_suspects"), [(1, True), (PROGRESS - 1, True), (PROGRESS, False)]
)
def test_two_deaths_between_which_requests_got_on_make_no_suspects(num_tokens, are_suspects):
    """The second death may come an hour later, and has nothing to do with the first."""
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    for key in "ab":
        scheduler.add(make_request(key, max_tokens=100))
    assert die(scheduler, engine) is None
    for _ in range(num_tokens):
        run_step(scheduler, engine)
    assert die(scheduler, engine) is None
    assert len(scheduler.plan(0.0).rows) == (1 if are_suspects else 2)


def die(scheduler: Scheduler, engine: EchoExecutor) -> Request | None:
    """Lose an engine in the middle of a step, and begin on another one; returns who is guilty."""
    scheduler.plan(0.0)
    guilty = scheduler.blame()
    engine.restart()
    scheduler.reset()
    return guilty


def test_a_suspect_that_has_run_alone_is_no_longer_one_at_the_next_death():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    for key in "ab":
        scheduler.add(make_request(key, max_tokens=100))
    for _ in range(2):
        assert die(scheduler, engine) is None
    for _ in range(2):
        run_step(scheduler, engine)  # one after the other
    assert die(scheduler, engine) is None
    assert len(scheduler.plan(0.0).rows) == 2


def test_a_suspect_that_is_cancelled_frees_the_others():
    scheduler = make_scheduler()
    for key in "ab":
        scheduler.add(make_request(key))
    for _ in range(2):
        scheduler.plan(0.0)
        assert scheduler.blame() is None
        scheduler.reset()
    scheduler.finish("a")
    plan = scheduler.plan(0.0)
    assert len(plan.rows) == 1
    scheduler.finish("b")
    scheduler.reset()
    assert not scheduler.requests


def test_a_suspect_that_was_ended_before_the_engine_died_of_it_is_not_ended_again():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    for key in "ab":
        scheduler.add(make_request(key))
    for _ in range(2):
        assert die(scheduler, engine) is None
    assert len(scheduler.plan(0.0).rows) == 1
    assert scheduler.finish("a").key == "a"
    assert scheduler.blame() is None
    engine.restart()
    scheduler.reset()
    check_invariants(scheduler)
    assert list(run_to_end(scheduler, engine)) == ["b"]


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


def test_a_probe_is_in_no_count_of_tokens():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", is_probe=True))
    run_to_end(scheduler, EchoExecutor(block_size=LIMITS.block_size))
    assert scheduler.stats.prompt_tokens_computed == 0
    assert scheduler.stats.prefix_queried_tokens == 0


# ---------------------------------------------------------------------- several steps in flight


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


def test_results_are_applied_in_the_order_of_their_plans():
    scheduler = make_scheduler(num_stages=2)
    engine = make_engine(scheduler)
    add_requests(scheduler, "ab")
    results = [engine.submit(plan).result(None) for plan in plan_all(scheduler)]
    with pytest.raises(AssertionError, match="wrong result"):
        scheduler.apply(results[1], 0.0)


def test_no_more_steps_are_in_flight_than_the_engine_takes():
    scheduler = make_scheduler(num_stages=2)
    add_requests(scheduler, "abc")
    plan_all(scheduler)
    with pytest.raises(AssertionError, match="too many steps"):
        scheduler.plan(0.0)


def test_a_reset_gives_all_steps_in_flight_up():
    scheduler = make_scheduler(num_stages=2)
    add_requests(scheduler, "abc")
    plan_all(scheduler)
    scheduler.finish("b")
    scheduler.reset()
    check_invariants(scheduler)
    first, second = plan_all(scheduler)
    assert (first.reset, second.reset) == (True, False)
    assert [join.token_ids for plan in (first, second) for join in plan.joins] == [
        [ord(key)] * 8 for key in "ac"
    ]


def test_all_requests_in_flight_at_two_deaths_are_suspects_and_run_alone():
    scheduler = make_scheduler(num_stages=2)
    engine = make_engine(scheduler)
    add_requests(scheduler, "abc", max_tokens=1)
    for _ in range(2):
        plan_all(scheduler)
        assert scheduler.blame() is None
        scheduler.reset()
    for key in "abc":
        (plan,) = plan_all(scheduler)
        (update,) = scheduler.apply(engine.submit(plan).result(None), 0.0)
        assert update.request.key == key


def test_what_a_client_guesses_is_verified_with_its_prompt_and_then_while_it_is_right():
    speculation = Speculation(max_drafts=3, policy=FixedDepth(), drafter=EchoDrafter(64))
    scheduler = Scheduler(LIMITS, hash_secret=b"test", speculation=speculation)
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


@pytest.mark.parametrize(("num_stages", "seconds"), [(1, 7.0), (2, 0.001)])
def test_the_time_of_a_step_is_its_cycle_unless_it_waited_behind_others(num_stages, seconds):
    class Observed(FixedDepth):
        def observe_step(self, shape, seconds, draft_seconds):
            observed.append((seconds, shape.num_tokens))

    observed: list[tuple[float, int]] = []
    limits = replace(LIMITS, num_stages=num_stages)
    speculation = Speculation(max_drafts=2, policy=Observed())
    scheduler = Scheduler(limits, hash_secret=b"test", speculation=speculation)
    add_requests(scheduler, "a")
    plan = scheduler.plan(3.0)
    scheduler.apply(make_engine(scheduler).submit(plan).result(None), 10.0)
    assert observed == [(seconds, 8)]
