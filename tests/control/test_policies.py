"""Scheduling policies one by one: order, displacement, and what they cost."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.control import KVPool, Request, Scheduler
from charonia.control.cache.block_tables import BlockTables
from charonia.control.policies import (
    DisplacementByPriority,
    Policy,
    by_arrival,
    by_priority,
    fair,
    ranked,
)
from charonia.control.scheduling.admission import MAX_DISPLACED
from charonia.control.scheduling.fitting import MAX_PASSES, Fitting
from support.counting import count_calls
from support.echo import EchoExecutor
from support.invariants import check_invariants
from support.stepping import LIMITS, Bench, make_request


def by_priority_alone(aging_s: float = 0.0) -> Policy:
    rank = by_priority(aging_s)
    return ranked(rank, DisplacementByPriority(rank))


# ---------------------------------------------------------------------- the queue


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=40), st.integers(0, 40))
def test_the_waiting_come_by_rank_whoever_came_and_went(moves, num_again):
    queue = by_priority_alone().waiting
    waiting: list[Request] = []
    for number, (priority, is_coming) in enumerate(moves):
        if is_coming or not waiting:
            waiting.append(make_request("x", priority, number=number))
            queue.push(waiting[-1], is_new=True)
        else:
            queue.remove(waiting.pop(priority % len(waiting)))
    for request in waiting[:num_again]:
        queue.remove(request)
        assert request not in queue
        queue.push(request, is_new=True)
    assert all(request in queue for request in waiting)
    assert len(queue) == len(waiting)
    assert list(queue.in_order()) == sorted(waiting, key=lambda one: (one.priority, one.number))


# ---------------------------------------------------------------------- first come first served


def test_whoever_came_first_is_served_first_whatever_the_priority():
    bench = Bench(ranked(by_arrival), max_num_seqs=1)
    bench.add(make_request("a", 2), make_request("b", -1), make_request("c", 0))
    bench.step()
    bench.add(make_request("d", -9))
    assert bench.ends() == ["a", "b", "c", "d"]
    assert bench.scheduler.stats.preemptions == 0


def test_one_that_does_not_fit_is_passed_by_others_but_not_for_ever():
    bench = Bench(ranked(by_arrival), max_num_seqs=4)
    bench.add(make_request("a", token_ids=[1] * 20, max_tokens=40))
    bench.step()
    bench.add(large := make_request("b", token_ids=[2] * 50, max_tokens=1))
    small = [make_request(f"c{i:02}", token_ids=[3 + i], max_tokens=1) for i in range(40)]
    bench.add(*small)
    ends = bench.ends()
    assert large.num_passed == MAX_PASSES
    assert ends[:MAX_PASSES] == [one.key for one in small[:MAX_PASSES]]
    assert ends[MAX_PASSES : MAX_PASSES + 2] == ["a", "b"]


def test_nobody_passes_one_that_was_preempted():
    bench = Bench(ranked(by_arrival), max_num_seqs=4)
    bench.add(make_request("a", token_ids=[1] * 30, max_tokens=30))
    bench.add(make_request("b", token_ids=[2] * 26, max_tokens=30))
    while not bench.scheduler.stats.preemptions:
        bench.step()
    assert bench.running == {"a"}
    bench.add(make_request("c", token_ids=[3], max_tokens=1))
    assert bench.ends() == ["a", "b", "c"] or bench.scheduler.stats.preemptions


# ---------------------------------------------------------------------- priority


def test_the_smaller_priority_is_admitted_first_and_equals_in_the_order_of_arrival():
    bench = Bench(by_priority_alone(), max_num_seqs=1)
    bench.add(make_request("a", 2), make_request("b", -1), make_request("c", 2))
    bench.add(make_request("d", -1))
    assert bench.ends() == ["b", "d", "a", "c"]


def test_a_request_that_outranks_takes_the_row_of_the_last_in_the_next_plan():
    bench = Bench(by_priority_alone())
    bench.add(make_request("a", 1), make_request("b", 2))
    bench.step()
    bench.add(make_request("c", 0))
    plan = bench.step()
    assert bench.running == {"a", "c"}
    assert [row.num_tokens for row in plan.rows] == [8, 1]  # c before a
    assert bench.scheduler.stats.preemptions == 1
    assert bench.ends() == ["a", "c", "b"]


def test_of_a_burst_of_urgent_requests_each_step_admits_as_many_as_it_may_displace():
    num = MAX_DISPLACED + 4
    bench = Bench(
        by_priority_alone(),
        max_num_seqs=num,
        num_blocks=10 * num,
        max_num_batched_tokens=20 * num,
    )
    bench.add(*(make_request(f"a{i:02}", 1) for i in range(num)))
    bench.step()
    bench.add(*(make_request(f"b{i:02}", 0) for i in range(num)))
    assert [len(bench.step().joins) for _ in range(2)] == [MAX_DISPLACED, 4]
    assert all(key.startswith("b") for key in bench.running)


def test_a_plan_that_displaces_many_counts_once_what_the_rows_lack(monkeypatch):
    bench = Bench(by_priority_alone(), max_num_seqs=32, num_blocks=200, max_num_batched_tokens=512)
    bench.add(*[make_request(f"{n}", 1) for n in range(32)])
    bench.step()
    bench.add(*[make_request(f"u{n}", 0) for n in range(MAX_DISPLACED)])
    calls = count_calls(monkeypatch, Fitting, "num_owed")
    assert len(bench.step().joins) == MAX_DISPLACED
    assert calls["num_owed"] == 1


def test_what_victims_hold_is_not_looked_at_block_by_block_where_all_of_it_is_too_little(
    monkeypatch,
):
    bench = Bench(by_priority_alone(), max_num_seqs=8)
    bench.add(make_request("a", 0, token_ids=[1] * 40, max_tokens=4))
    bench.add(make_request("b", 2, max_tokens=4))
    bench.step()
    bench.add(make_request("u", 1, token_ids=[3] * 32, max_tokens=1))
    calls = count_calls(monkeypatch, Fitting, "_num_released")
    bench.step()
    assert bench.running == {"a", "b"}
    assert not calls


def test_who_shares_what_it_gives_up_counts_for_little(monkeypatch):
    """Two hold the same blocks, which are free when a third one has given them up, too."""
    bench = Bench(by_priority_alone(), max_num_seqs=8)
    shared = [5] * 32
    bench.add(make_request("a", 2, token_ids=shared, max_tokens=20))
    bench.step()
    bench.add(*[make_request(key, 2, token_ids=[*shared, 6], max_tokens=20) for key in "bc"])
    bench.step()
    bench.add(make_request("u", 0, token_ids=[7] * 30, max_tokens=4))
    bench.step()
    assert bench.running == {"u"}
    assert bench.scheduler.stats.preemptions == 3


@pytest.mark.parametrize("make", [ranked, partial(fair, weight_of=lambda _: 1.0)])
def test_a_change_costs_no_look_at_the_level_of_every_row(monkeypatch, make):
    rank = by_priority()
    policy = make(rank, displacement=DisplacementByPriority(rank))
    bench = Bench(policy, max_num_seqs=32, num_blocks=200, max_num_batched_tokens=512)
    bench.add(*[make_request(f"{n}", tenant=str(n)) for n in range(40)])
    bench.step()
    bench.scheduler.finish("0")
    calls = count_calls(monkeypatch, DisplacementByPriority, "level")
    assert len(bench.step().joins) == 1
    assert calls["level"] < 16


@pytest.mark.parametrize(("num_blocks", "left"), [(3, "abc"), (6, "ab"), (10, "a"), (14, "")])
def test_it_takes_as_many_blocks_as_it_lacks_and_no_more(num_blocks, left):
    """Each that runs holds four of 16 blocks; one stays free, but for one that is alone."""
    bench = Bench(by_priority_alone(), max_num_seqs=8)
    bench.add(*(make_request(key, 1, token_ids=[ord(key)] * 13, max_tokens=9) for key in "abc"))
    bench.step()
    bench.add(make_request("u", 0, token_ids=[1] * 4 * num_blocks, max_tokens=1))
    bench.scheduler.plan(0.0)
    assert bench.running == {*left, "u"}


def test_of_who_is_displaced_nothing_is_kept_that_it_will_not_take():
    rank = by_priority()
    bench = Bench(ranked(rank, DisplacementByPriority(rank)), max_num_seqs=1)
    bench.add(make_request("a", takes_hits=False))
    bench.step()
    bench.add(make_request("u", -1))
    bench.step()
    assert bench.running == {"u"}
    assert bench.scheduler.kv.num_reserved == 0
    assert bench.ends() == ["u", "a"]


def test_equals_do_not_displace_each_other():
    bench = Bench(by_priority_alone(), max_num_seqs=1)
    bench.add(make_request("a", 1))
    bench.step()
    bench.add(make_request("b", 1))
    assert bench.ends() == ["a", "b"]
    assert bench.scheduler.stats.preemptions == 0


def test_nobody_is_preempted_for_a_request_that_would_not_fit_even_then():
    bench = Bench(by_priority_alone(), max_num_seqs=8)
    bench.add(make_request("a", 0, token_ids=[1] * 40, max_tokens=4))
    bench.add(make_request("b", 2, token_ids=[2] * 8, max_tokens=4))
    bench.step()
    bench.add(make_request("c", 1, token_ids=[3] * 32, max_tokens=1))
    bench.step()
    assert bench.running == {"a", "b"}
    assert bench.scheduler.stats.preemptions == 0
    assert bench.ends()[-1] == "c"


def test_blocks_that_victims_share_are_free_when_all_of_them_are_preempted():
    bench = Bench(by_priority_alone(), max_num_seqs=8)
    shared = [5] * 32
    bench.add(make_request("a", 2, token_ids=shared, max_tokens=20))
    bench.step()
    bench.add(make_request("b", 2, token_ids=[*shared, 6], max_tokens=20))
    bench.step()
    assert bench.scheduler.kv.num_used < 12
    bench.add(make_request("c", 0, token_ids=[7] * 56, max_tokens=4))
    bench.step()
    assert bench.running == {"c"}
    assert bench.scheduler.stats.preemptions == 2


def test_hits_on_a_victims_blocks_are_used_and_do_not_count_as_freed():
    bench = Bench(by_priority_alone(), max_num_seqs=1)
    bench.add(make_request("a", 1, token_ids=[5] * 32))
    bench.step()
    bench.add(make_request("b", 0, token_ids=[5] * 60, max_tokens=2))
    plan = bench.step()
    assert plan.joins[0].num_computed == 32
    assert bench.running == {"b"}


def test_a_long_cached_prefix_is_not_searched_once_per_block_of_the_victims(monkeypatch):
    class Hits(list):
        def __contains__(self, block_id):
            raise AssertionError("that takes as long as there are hits")

    hits = BlockTables.hits
    monkeypatch.setattr(BlockTables, "hits", lambda self, request: Hits(hits(self, request)))
    bench = Bench(by_priority_alone(), max_num_seqs=2)
    bench.add(make_request("a", 1, token_ids=[5] * 32), make_request("c", 2, token_ids=[6] * 24))
    bench.step()
    bench.add(make_request("b", 0, token_ids=[5] * 60, max_tokens=2))
    bench.step()
    assert "b" in bench.running


def test_without_chunks_a_displacing_prompt_waits_for_a_step_with_room():
    bench = Bench(by_priority_alone(), enable_chunked_prefill=False, max_num_seqs=3)
    bench.add(make_request("a", 0, token_ids=[1] * 4), make_request("z", 5, token_ids=[9] * 4))
    bench.step()
    bench.add(make_request("b", 1, token_ids=[2] * 63, max_tokens=1))
    bench.add(make_request("c", 1, token_ids=[3] * 4))
    assert bench.ends()[-1] in "bz"


def test_with_age_a_request_comes_to_the_front_and_cannot_be_displaced_any_more():
    bench = Bench(by_priority_alone(aging_s=10.0), max_num_seqs=1)
    bench.add(make_request("a", 3, arrived_at=0.0))
    bench.step()
    bench.add(make_request("b", 0, arrived_at=29.0), make_request("c", 0, arrived_at=31.0))
    bench.step()
    assert bench.running == {"b"}  # 29 s later, and 30 s more urgent
    assert bench.ends() == ["b", "a", "c"]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_who_is_in_a_step_is_not_displaced_before_it_is_applied(num_stages):
    policy = by_priority_alone()
    limits = replace(LIMITS, max_num_seqs=1, num_stages=num_stages)
    scheduler = Scheduler(limits, KVPool(b"test"), policy=policy)
    scheduler.add(make_request("a", 1))
    plan = scheduler.plan(0.0)
    scheduler.add(make_request("b", 0))
    if num_stages == 2:
        assert scheduler.plan(0.0) is None
    check_invariants(scheduler)
    engine = EchoExecutor(max_num_seqs=1, block_size=4, num_blocks=17)
    scheduler.apply(engine.submit(plan).result(None), 0.0)
    plan = scheduler.plan(0.0)
    assert [join.token_ids[0] for join in plan.joins] == [ord("b")]


def test_three_parts_of_different_policies_make_a_policy():
    """First come first served, but urgent requests may displace, and the oldest has to go."""
    displacement = DisplacementByPriority(by_priority())
    order = ranked(by_arrival)
    last_first = ranked(lambda request: (0.0, -request.number), displacement)
    bench = Bench(Policy(order.waiting, last_first.running, displacement), max_num_seqs=2)
    bench.add(make_request("a", 5), make_request("b", 5))
    bench.step()
    bench.add(make_request("c", 0))
    bench.step()
    assert bench.running == {"b", "c"}
