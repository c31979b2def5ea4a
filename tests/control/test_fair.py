"""Fair shares between tenants: who is next, and how far two tenants can come apart."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.control import PeakMemory, Request, Update
from charonia.control.policies import (
    DeadlineWatch,
    DisplacementByPriority,
    by_arrival,
    by_deadline,
    by_priority,
    fair,
)
from charonia.control.policies.fair import MAX_LOST, MAX_REMEMBERED, FairWaiting, VirtualCounters
from charonia.control.scheduling.fitting import MAX_HARMLESS, MAX_PASSES
from support.counting import count_calls
from support.stepping import Bench, make_request


def equal(_: str) -> float:
    return 1.0


def level(request: Request) -> float:
    return request.priority


def request_of(tenant: str, number: int, **changes):
    return make_request(f"{tenant}{number}", tenant=tenant, number=number, **changes)


def charge(counters: VirtualCounters, request, num_input: int, num_output: int) -> None:
    """As if its prompt had so many tokens, and then it generated some."""
    request.num_cached = request.num_prompt - num_input
    counters.note_admission(request)
    counters.note_outputs([Update(request, [1] * num_output, None, None, 0, None)])


# ---------------------------------------------------------------------- the queue


def test_the_tenant_that_has_had_the_least_is_next():
    counters = VirtualCounters()
    queue = FairWaiting(counters, by_arrival, running=["b", "a", "c"], level=level)
    many = [request_of("a", i) for i in range(3)]
    few = [request_of("b", i) for i in range(3, 5)]
    for request in [*many, *few]:
        queue.push(request, is_new=True)
    assert [one.key for one in queue.in_order()] == ["a0", "a1", "a2"]
    assert [one.key for one in queue.foremost(inf)] == ["a0", "b3"]
    charge(counters, many[0], 10, 0)
    queue.remove(many[0])
    assert [one.key for one in queue.in_order()] == ["b3", "b4"]
    assert [one.key for one in queue.foremost(inf)] == ["b3", "a1"]
    charge(counters, few[0], 0, 6)
    assert next(queue.in_order()).key == "a1"


def test_only_who_runs_or_has_had_little_may_take_anything():
    counters = VirtualCounters()
    queue = FairWaiting(counters, by_arrival, running=["a"], level=level)
    requests = [request_of(tenant, number) for number, tenant in enumerate("abcdefgh")]
    for request in requests:
        queue.push(request, is_new=True)
    for number, request in enumerate(requests):
        charge(counters, request, 10 - number, 0)
    found = [one.key for one in queue.foremost(inf)]
    assert "a0" in found, "it runs"
    assert "h7" in found, "it has had the least"
    assert found == sorted(found, reverse=True)
    assert len(found) < len(requests)


@pytest.mark.parametrize(("more_for_a", "foremost"), [(0, "acfg"), (100, "cfgb")])
def test_those_that_have_had_the_least_may_whatever_the_order_in_which_they_came(
    more_for_a, foremost
):
    counters = VirtualCounters()
    queue = FairWaiting(counters, by_arrival, level=level)
    requests = [request_of(tenant, number) for number, tenant in enumerate("abcdefg")]
    for request, charged in zip(requests, (1, 10, 2, 11, 12, 3, 4), strict=True):
        counters.lift(request.tenant, charged)
        queue.push(request, is_new=False)
    counters.lift("a", more_for_a)
    for _ in range(2):  # a look changes nothing
        assert [one.tenant for one in queue.foremost(inf)] == list(foremost)
    assert next(queue.in_order()).tenant == foremost[0]


def test_nobody_is_looked_at_where_none_is_more_urgent_than_those_that_run():
    queue = FairWaiting(VirtualCounters(), by_priority(), running=["a", "b"], level=level)
    for number, (tenant, priority) in enumerate((("a", 2), ("b", 1), ("b", 3))):
        queue.push(request_of(tenant, number, priority=priority), is_new=True)
    assert [one.key for one in queue.foremost(2)] == ["a0", "b1"]
    assert [one.key for one in queue.foremost(1)] == []
    _, most_urgent = queue.foremost(2)
    queue.remove(most_urgent)
    assert [one.key for one in queue.foremost(2)] == []
    assert [one.key for one in queue.foremost(3)] == ["a0", "b2"]


def test_a_generated_token_costs_twice_a_prompt_token_and_weights_divide():
    counters = VirtualCounters({"a": 1.0, "b": 4.0}.__getitem__)
    charge(counters, request_of("a", 0), 3, 2)
    charge(counters, request_of("b", 1), 3, 2)
    assert (counters["a"], counters["b"]) == (7.0, 1.75)


def test_who_comes_back_has_not_saved_up_service():
    counters = VirtualCounters()
    queue = FairWaiting(counters, by_arrival)
    queue.push(busy := request_of("busy", 0), is_new=True)
    charge(counters, busy, 100, 0)
    queue.push(request_of("idle", 1), is_new=True)
    assert counters["idle"] == 100.0
    queue.push(request_of("idle", 2), is_new=True)
    assert counters["idle"] == 100.0


def test_who_comes_to_an_empty_queue_is_lifted_to_the_one_that_left_last():
    counters = VirtualCounters()
    queue = FairWaiting(counters, by_arrival)
    queue.push(last := request_of("last", 0), is_new=True)
    charge(counters, last, 50, 0)
    queue.remove(last)
    queue.push(request_of("idle", 1), is_new=True)
    assert counters["idle"] == 50.0


def test_who_comes_while_nobody_waits_is_lifted_to_what_the_last_one_has_had_since():
    counters = VirtualCounters()
    queue = FairWaiting(counters, by_arrival)
    queue.push(last := request_of("last", 0), is_new=True)
    queue.remove(last)
    charge(counters, last, 50, 10)
    queue.push(request_of("idle", 1), is_new=True)
    assert counters["idle"] == 70.0


def test_who_was_lifted_is_not_forgotten_at_once():
    counters = VirtualCounters()
    queue = FairWaiting(counters, by_arrival)
    for number in range(2 * MAX_REMEMBERED):
        counters.lift(f"t{number}", 1000.0)
    queue.push(busy := request_of("busy", 0), is_new=True)
    charge(counters, busy, 500, 0)
    queue.push(request_of("idle", 1), is_new=True)
    assert counters["idle"] == 500.0
    assert len(counters._counters) < 2 * MAX_REMEMBERED


def test_one_that_comes_back_to_the_queue_is_not_lifted():
    counters = VirtualCounters()
    queue = FairWaiting(counters, by_arrival)
    queue.push(busy := request_of("busy", 0), is_new=True)
    charge(counters, busy, 100, 0)
    queue.push(request_of("other", 1), is_new=False)
    assert counters["other"] == 0.0
    assert next(queue.in_order()).key == "other1"


def test_a_tenant_whose_request_is_demoted_keeps_its_credit():
    policy = fair(by_deadline, equal, None, DeadlineWatch(demotes=True))
    bench = Bench(policy, max_num_seqs=1, num_blocks=100)
    bench.add(request_of("busy", 0, max_tokens=30), request_of("busy", 1, max_tokens=30))
    bench.step()
    bench.add(late := request_of("idle", 2, expires_at=5.0))
    credit = policy.service["idle"]
    for now in range(10):
        bench.step(now)
    assert late.is_demoted
    assert policy.service["busy"] > policy.service["idle"] == credit


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["come", "go", "charge"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_the_order_is_that_of_the_counters_whoever_comes_and_goes(moves):
    counters = VirtualCounters()
    queue = FairWaiting(
        counters, by_arrival, running=[f"t{number}" for number in range(4)], level=level
    )
    waiting = []
    for number, (tenant, move, amount) in enumerate(moves):
        request = request_of(f"t{tenant}", number)
        if move == "come":
            waiting.append(request)
            queue.push(request, is_new=True)
        elif move == "charge":
            charge(counters, request, amount, 0)
        elif waiting:
            queue.remove(gone := waiting.pop(amount % len(waiting)))
            assert gone not in queue
        assert len(queue) == len(waiting)
        assert all(one in queue for one in waiting)
        heads = list(queue.foremost(inf))
        firsts = {one.tenant: one for one in reversed(waiting)}
        assert {one.tenant: one for one in heads} == firsts
        assert sorted(counters[one.tenant] for one in heads) == [counters[h.tenant] for h in heads]
        found = list(queue.in_order())
        if waiting:
            least = found[0].tenant
            assert counters[least] == counters[heads[0].tenant]
            assert found == [one for one in waiting if one.tenant == least]
        else:
            assert found == []


def test_counters_of_tenants_that_have_gone_do_not_pile_up():
    counters = VirtualCounters()
    queue = FairWaiting(counters, by_arrival)
    queue.push(request_of("stays", 0), is_new=True)
    for number in range(1, 3 * MAX_REMEMBERED):
        queue.push(passing := request_of(f"t{number}", number), is_new=True)
        charge(counters, passing, number, 0)
        queue.remove(passing)
    assert len(counters._counters) <= 2 * MAX_REMEMBERED + 1
    assert queue._heap.num_places < 100
    assert counters[f"t{3 * MAX_REMEMBERED - 1}"] == 3 * MAX_REMEMBERED - 1


def test_the_counter_of_a_tenant_that_runs_is_kept():
    policy = fair(by_arrival, equal)
    policy.running.add(request_of("runs", 0))
    charge(policy.service, request_of("runs", 0), 5, 0)
    for number in range(1, 3 * MAX_REMEMBERED):
        policy.waiting.push(passing := request_of(f"t{number}", number), is_new=True)
        charge(policy.service, passing, number + 5, 0)
        policy.waiting.remove(passing)
    assert policy.service["runs"] == 5
    assert policy.service["t1"] == 0


# ---------------------------------------------------------------------- in the scheduler


def test_probes_are_charged_to_nobody():
    policy = fair(by_arrival, equal)
    bench = Bench(policy)
    bench.add(request_of("a", 0, is_probe=True))
    bench.ends()
    assert policy.service["a"] == 0.0


def test_cached_tokens_are_not_charged_nor_what_is_computed_again():
    policy = fair(by_arrival, equal)
    bench = Bench(policy, max_num_seqs=1)
    bench.add(request_of("a", 0, token_ids=[5] * 20, max_tokens=1))
    bench.ends()
    assert policy.service["a"] == 20 + 2
    bench.add(request_of("a", 1, token_ids=[5] * 20, max_tokens=3))
    bench.step()
    assert policy.service["a"] == 22 + 4 + 2  # four blocks were there
    bench.scheduler.reset()
    bench.ends()
    assert policy.service["a"] == 28 + 4


def test_within_a_tenant_priority_decides_and_displaces_its_own_alone():
    rank = by_priority()
    bench = Bench(fair(rank, equal, DisplacementByPriority(rank)), max_num_seqs=2)
    bench.add(request_of("a", 0, priority=3), request_of("b", 1, priority=3))
    bench.step()
    bench.add(request_of("a", 2, priority=1))
    bench.step()
    assert bench.running == {"a2", "b1"}
    bench.add(request_of("c", 3, priority=-9))
    bench.step()
    assert bench.running == {"a2", "b1"}


def test_victims_are_the_latest_of_the_tenant_that_has_had_the_most():
    bench = Bench(fair(by_arrival, equal), max_num_seqs=4, num_blocks=11)
    bench.add(request_of("a", 0, token_ids=[1] * 8, max_tokens=20))
    bench.add(request_of("b", 1, token_ids=[2] * 4, max_tokens=20))
    bench.add(request_of("a", 2, token_ids=[3] * 8, max_tokens=20))
    while not bench.scheduler.stats.preemptions:
        bench.step()
    assert bench.running == {"a0", "b1"}


def test_who_has_joined_a_step_stays_in_it_although_another_tenant_has_had_less_now():
    rank = by_priority()
    policy = fair(rank, equal, DisplacementByPriority(rank))
    bench = Bench(policy)
    bench.add(make_request("c", tenant="c"), make_request("d", -3, tenant="d", max_tokens=30))
    bench.step()
    assert isinstance(policy.service, VirtualCounters)
    charge(policy.service, request_of("b", 9), 5, 0)
    charge(policy.service, request_of("c", 9), 100, 0)
    bench.add(make_request("a", -1, tenant="a"), make_request("b", -2, tenant="b"))
    assert [join.token_ids[0] for join in bench.step().joins] == [ord("a")]
    assert [join.token_ids[0] for join in bench.step().joins] == [ord("b")]


def test_an_urgent_request_takes_from_its_own_tenant_or_from_one_that_has_had_more():
    rank = by_priority()

    def running_after(num_served: int) -> set[str]:
        """With both rows running requests of "b", which was given so much more before."""
        policy = fair(rank, equal, DisplacementByPriority(rank))
        bench = Bench(policy)
        bench.add(*[make_request(f"b{n}", tenant="b", max_tokens=30) for n in range(3)])
        bench.step()
        bench.add(make_request("u", -1, tenant="a"), make_request("v", -1, tenant="b"))
        assert isinstance(policy.service, VirtualCounters)
        charge(policy.service, request_of("a", 9), 10, 0)
        charge(policy.service, request_of("b", 9), num_served, 0)
        bench.step()
        return bench.running

    assert running_after(num_served=0) == {"b0", "v"}
    assert running_after(num_served=100) == {"u", "v"}


def test_a_tenant_does_not_keep_its_row_by_ever_more_urgent_requests():
    """Each is charged its prompt, and would displace the one before it."""
    rank = by_priority()
    bench = Bench(fair(rank, equal, DisplacementByPriority(rank)), max_num_seqs=1)
    bench.add(make_request("b", tenant="b"))
    bench.step()
    bench.add(other := make_request("a", tenant="a"))
    for number in range(20):
        bench.add(make_request(f"b{number}", -1 - number, tenant="b"))
        bench.step()
    assert other.started_at is not None


def test_who_has_had_more_passes_nobody_because_it_could_displace_its_own():
    """The first waiting request needs more blocks than are free, and the urgent one does not."""
    rank = by_priority()
    policy = fair(rank, equal, DisplacementByPriority(rank))
    bench = Bench(policy, num_blocks=11)
    bench.add(make_request("b", tenant="b", max_tokens=30))
    bench.step()
    bench.add(make_request("a", tenant="a", token_ids=[1] * 36), make_request("u", -1, tenant="b"))
    assert isinstance(policy.service, VirtualCounters)
    charge(policy.service, request_of("b", 9), 100, 0)
    bench.step()
    assert bench.running == {"b"}


def test_urgent_requests_do_not_take_what_is_free_for_ever_from_a_tenant_that_has_had_less():
    """Its request needs more blocks than are free as long as others come and go."""
    rank = by_priority()
    policy = fair(rank, lambda _: 1.0, DisplacementByPriority(rank))
    bench = Bench(policy, max_num_seqs=8, num_blocks=41, max_model_len=150)
    bench.add(make_request("z", 1, tenant="B", max_tokens=140))  # whom the urgent ones outrank
    bench.step()
    large = make_request("a", 1, tenant="A", token_ids=[1] * 100, max_tokens=2)
    coming = iter(range(1000))
    for step in range(100):
        while sum(one.key.startswith("b") for one in bench.scheduler.requests) < 6:
            number = next(coming)
            ids = [number % 251, *[3] * 11]
            length = 4 + number % 3
            bench.add(make_request(f"b{number}", tenant="B", token_ids=ids, max_tokens=length))
        if step == 5:
            bench.add(large)
        bench.step()
        if large.started_at is not None:
            break
    assert large.started_at is not None
    assert 0 < large.num_passed <= MAX_PASSES


def test_who_was_preempted_a_few_times_keeps_its_row_from_other_tenants():
    rank = by_priority()
    policy = fair(rank, equal, DisplacementByPriority(rank))
    bench = Bench(policy, max_num_seqs=1)
    bench.add(make_request("b0", tenant="b", max_tokens=30))
    bench.step()
    assert isinstance(policy.service, VirtualCounters)
    for number in range(MAX_LOST + 1):
        bench.add(make_request(f"u{number}", -1, tenant="a", max_tokens=2))
        charge(policy.service, request_of("b", 9), 1000, 0)
        bench.step()
        assert bench.running == {f"u{number}" if number < MAX_LOST else "b0"}
        while "b0" not in bench.running:
            bench.step()
    bench.add(make_request("w", -1, tenant="b", max_tokens=2))
    charge(policy.service, request_of("a", 9), 1000 * (MAX_LOST + 1), 0)
    bench.step()
    assert bench.running == {"w"}


@pytest.mark.parametrize(
    ("expects", "limits", "running"),
    [
        (None, {"max_num_seqs": 3}, {"b", "u", "a"}),
        (None, {"max_num_seqs": 2}, {"u", "a"}),
        (None, {"max_num_seqs": 3, "num_blocks": 8}, {"u", "a"}),
        (False, {"max_num_seqs": 3}, {"b", "u", "a"}),
        (False, {"max_num_seqs": 3, "num_blocks": 8}, {"u", "a"}),
        (True, {"max_num_seqs": 3}, {"b", "u", "a"}),
    ],
)
def test_nothing_is_displaced_where_the_first_one_fits_beside_the_urgent_one(
    limits, running, expects
):
    """Nobody may pass the first one, which was preempted and may displace nobody."""
    rank = by_priority()
    policy = fair(rank, equal, DisplacementByPriority(rank))
    peak = None if expects is None else PeakMemory(expects=expects)
    bench = Bench(policy, peak_memory=peak, **limits)
    bench.add(make_request("b", 5, tenant="b", max_tokens=4))
    bench.step()
    assert isinstance(policy.service, VirtualCounters)
    charge(policy.service, request_of("b", 9), 1000, 0)
    bench.add(make_request("a", 5, tenant="a", num_preemptions=1, max_tokens=4))
    bench.add(make_request("u", -1, tenant="b", max_tokens=4))
    assert next(join.token_ids[0] for join in bench.step().joins) == ord("u")
    bench.step()
    assert bench.running == running
    assert bench.scheduler.stats.preemptions == len({"b"} - running)


@pytest.mark.parametrize("num_harmless", [MAX_HARMLESS - 1, MAX_HARMLESS])
def test_a_step_looks_at_a_few_that_can_displace_nobody_and_the_next_one_at_others(num_harmless):
    """What came long ago is displaced by nobody here, and who came last by its own tenant alone.

    Equal counters are in the order of the names.
    """
    rank = by_priority(aging_s=60.0)
    policy = fair(rank, equal, DisplacementByPriority(rank))
    num = num_harmless + 1
    bench = Bench(policy, max_num_seqs=num, num_blocks=20 * num, max_num_batched_tokens=20 * num)
    for number in range(num):
        arrived_at = 0.0 if number < num_harmless else 1000.0
        name = f"t{number}"
        bench.add(make_request(name, 5, tenant=name, arrived_at=arrived_at, max_tokens=40))
    *_, last = bench.scheduler.requests
    last.num_preemptions = MAX_LOST
    bench.step()
    for number in range(num):
        name = f"t{number}"
        bench.add(make_request(f"u{number}", 4, tenant=name, arrived_at=1000.0))
    bench.step()
    assert (f"u{num - 1}" in bench.running) == (num_harmless < MAX_HARMLESS)
    bench.step()
    assert f"u{num - 1}" in bench.running


def test_a_plan_puts_tenants_that_run_in_order_once_where_nothing_is_charged(monkeypatch):
    bench = Bench(fair(by_arrival, equal), num_blocks=100, max_num_seqs=8)
    bench.add(*[make_request(f"{n}", tenant=str(n)) for n in range(9)])
    bench.step()
    result = bench.engine.submit(bench.scheduler.plan(0.0)).result(None)
    bench.scheduler.apply(result, 0.0)
    bench.scheduler.finish("0")
    calls = count_calls(monkeypatch, VirtualCounters, "in_order")
    assert len(bench.scheduler.plan(0.0).joins) == 1
    assert calls["in_order"] == 1


def test_counters_are_asked_for_few_of_those_that_run_beside_harmless_requests(monkeypatch):
    """Of the rows one has a higher level, and comes before all that wait."""
    rank = by_priority(aging_s=1.0)
    policy = fair(rank, equal, DisplacementByPriority(rank))
    bench = Bench(policy, num_blocks=400, max_num_seqs=32, max_num_batched_tokens=512)
    bench.add(make_request("old", 5, arrived_at=-100.0))
    bench.add(*[make_request(f"{n}", tenant=str(n)) for n in range(31)])
    bench.step()
    bench.add(*[make_request(f"w{n}", tenant=str(n), arrived_at=9.0) for n in range(8)])
    calls = count_calls(monkeypatch, VirtualCounters, "__getitem__")
    assert not bench.step().joins
    assert calls["__getitem__"] < 64
