"""A step that is planned while the one before it computes, for the same rows."""

from collections import deque

import pytest

from charonia.control import (
    NO_SHEDDING,
    AdaptiveDepth,
    FixedDepth,
    LoadShedding,
    Request,
    Speculation,
)
from charonia.control.policies import DisplacementByPriority, by_priority, ranked
from charonia.protocol import StepPlan
from support import stepping
from support.echo import EchoDrafter, echo_run, echo_token
from support.invariants import check_invariants
from support.stepping import make_request

VOCAB = 64


class Bench(stepping.Bench):
    """The same with the steps between scheduler and engine."""

    def __init__(self, **values) -> None:
        super().__init__(async_scheduling=True, vocab_size=VOCAB, **values)
        self.in_flight: deque = deque()
        self.tokens: dict[str, list[int]] = {}

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(0.0)
        check_invariants(self.scheduler)
        if plan is not None:
            self.in_flight.append(self.engine.submit(plan))
        return plan

    def apply(self) -> None:
        result = self.in_flight.popleft().result(None)
        for update in self.scheduler.apply(result, 0.0):
            self.tokens.setdefault(update.request.key, []).extend(update.token_ids)
        check_invariants(self.scheduler)

    def run(self) -> list[int]:
        """To the end, as far ahead as may be; how many steps were in flight after each plan."""
        found = []
        while self.scheduler.num_live or self.in_flight:
            while len(self.in_flight) < 2 and self.plan() is not None:
                pass
            found.append(len(self.in_flight))
            self.apply()
        return found


def expected(request: Request) -> list[int]:
    return echo_run(
        request.token_ids[: request.num_prompt],
        seed=1,
        max_tokens=request.max_tokens,
        vocab_size=VOCAB,
        stop_ids=request.stop_ids,
    )


def test_a_length_is_known_beforehand_and_costs_no_step():
    bench = Bench()
    bench.add(request := make_request("a"))
    assert bench.run() == [2] * 7 + [1]
    assert bench.tokens["a"] == expected(request)
    assert bench.engine.num_steps == request.max_tokens


def test_a_stop_token_costs_one_step_whose_token_nobody_sees():
    bench = Bench()
    stop = expected(make_request("a"))[3]
    bench.add(request := make_request("a", stop_ids=frozenset({stop})))
    while bench.scheduler.num_live:
        while len(bench.in_flight) < 2:
            bench.plan()
        bench.apply()
    assert bench.scheduler.kv.num_used > 0, "a step writes there"
    bench.apply()
    assert bench.scheduler.kv.num_used == 0
    assert bench.tokens["a"] == expected(request)
    assert bench.engine.num_steps == len(bench.tokens["a"]) + 1


def test_a_request_that_is_ended_from_outside_gets_no_token_of_the_steps_in_flight():
    bench = Bench(num_blocks=33)
    bench.add(request := make_request("a", max_tokens=20))
    for _ in range(2):
        bench.plan()
    for _ in range(5):
        bench.apply()
        bench.plan()
    num_known = len(bench.tokens["a"])
    assert bench.scheduler.finish("a") is request
    bench.add(make_request("a"))  # another one of this name is none of its business
    bench.run()
    assert bench.tokens["a"][num_known:] == expected(make_request("a"))


def test_chunks_of_a_prompt_follow_each_other_without_waiting():
    bench = Bench(max_num_batched_tokens=4)
    bench.add(request := make_request("a", token_ids=[5] * 14))
    assert [bench.plan().rows[0].num_tokens for _ in range(2)] == [4, 4]
    bench.run()
    assert bench.tokens["a"] == expected(request)


def test_who_lacks_blocks_waits_for_those_in_flight_and_nobody_gets_ahead():
    bench = Bench(num_blocks=9, max_num_seqs=3)
    requests = [make_request(key, max_tokens=20) for key in "abc"]
    bench.add(*requests)
    in_flight = bench.run()
    assert bench.scheduler.stats.preemptions > 0
    assert 1 in in_flight[:-2], "somebody waited"
    assert 2 in in_flight
    assert bench.tokens == {request.key: expected(request) for request in requests}


def test_an_urgent_request_is_in_the_next_plan_although_it_displaces_one_in_flight():
    rank = by_priority()
    bench = Bench(policy=ranked(rank, DisplacementByPriority(rank)), max_num_seqs=1)
    bench.add(patient := make_request("a", priority=1, max_tokens=30))
    for _ in range(2):
        bench.plan()
    bench.apply()
    bench.add(urgent := make_request("b"))
    assert bench.plan() is None, "its row is to be had when the step is applied"
    bench.apply()
    plan = bench.plan()
    assert [join.token_ids[0] for join in plan.joins] == [ord("b")]
    bench.run()
    assert bench.tokens == {"a": expected(patient), "b": expected(urgent)}


def test_a_row_that_is_free_is_given_at_once_and_one_in_flight_is_waited_for():
    rank = by_priority()
    bench = Bench(policy=ranked(rank, DisplacementByPriority(rank)))
    bench.add(make_request("a", priority=1, max_tokens=30))
    bench.plan()
    bench.add(make_request("b"), make_request("c"))
    plan = bench.plan()
    assert [join.token_ids[0] for join in plan.joins] == [ord("b")]
    assert len(plan.rows) == 2
    bench.apply()
    assert bench.plan() is None
    bench.apply()
    assert [join.token_ids[0] for join in bench.plan().joins] == [ord("c")]


def test_who_is_admitted_counts_on_no_block_that_a_token_in_flight_will_take():
    rank = by_priority()
    bench = Bench(
        policy=ranked(rank, DisplacementByPriority(rank)),
        num_blocks=6,
        block_size=1,
        max_model_len=5,
        max_num_seqs=4,
        max_num_batched_tokens=3,
    )
    requests = [
        make_request(key, priority, token_ids=[ord(key)], max_tokens=4)
        for key, priority in [("v", 2), ("a", 0), ("b", 0), ("c", 0), ("u", 1)]
    ]
    bench.add(requests[0])
    bench.plan()
    bench.add(*requests[1:4])
    bench.plan()
    bench.apply()
    bench.add(requests[4])
    assert bench.plan() is None, "it would count on their blocks"
    bench.run()
    assert bench.tokens == {request.key: expected(request) for request in requests}


def test_a_suspect_has_no_second_step_in_flight():
    bench = Bench()
    bench.add(make_request("a"), make_request("b"))
    for _ in range(2):
        bench.plan()
        bench.scheduler.blame()
        bench.scheduler.reset()
        bench.engine.restart()
        bench.in_flight.clear()
    assert len(bench.plan().rows) == 1
    assert bench.plan() is None
    bench.run()
    assert sorted(bench.tokens) == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "is_ahead"),
    [
        ({}, False),
        ({"speculates": False}, True),
        ({"speculates": False, "expected_ids": deque([1, 2, 3])}, False),
    ],
)
def test_a_step_waits_for_the_tokens_that_drafts_may_follow(changes, is_ahead):
    drafter = EchoDrafter(VOCAB)
    bench = Bench(speculation=Speculation(max_drafts=3, policy=FixedDepth(), drafter=drafter))
    bench.add(request := make_request("a", **changes))
    bench.plan()
    assert (bench.plan() is not None) == is_ahead
    bench.run()
    assert bench.tokens["a"] == expected(request)


def test_a_drafter_that_finds_nothing_holds_up_no_step():
    class Silent(EchoDrafter):
        def propose(self, request, max_tokens):
            return []

    class Resting(FixedDepth):
        def rests(self, num_able, num_tokens):
            return True

    bench = Bench(speculation=Speculation(max_drafts=3, policy=Resting(), drafter=Silent(VOCAB)))
    bench.add(request := make_request("a"))
    bench.plan()
    bench.apply()
    bench.plan()
    assert bench.plan() is not None
    bench.run()
    assert bench.tokens["a"] == expected(request)


def test_without_speculation_for_a_while_steps_overlap_and_nothing_is_drafted():
    drafter = EchoDrafter(VOCAB)
    bench = Bench(speculation=Speculation(max_drafts=3, policy=FixedDepth(), drafter=drafter))
    bench.add(request := make_request("a"))
    bench.scheduler.shedding = LoadShedding(speculates=False)
    bench.plan()
    assert bench.plan() is not None
    bench.apply()
    assert request.drafts.num_rounds == 0
    bench.scheduler.shedding = NO_SHEDDING
    bench.run()
    assert request.drafts.num_rounds > 0
    assert bench.tokens["a"] == expected(request)


class Useless(EchoDrafter):
    """Whose drafts are always wrong."""

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        right = echo_token(request.token_ids, request.sampling.seed, VOCAB)
        return [(right + 1) % VOCAB] * max_tokens


def test_where_drafts_do_not_pay_steps_overlap_and_some_still_look_whether_they_do():
    policy = AdaptiveDepth(has_draft_model=False)
    speculation = Speculation(max_drafts=3, policy=policy, drafter=Useless(VOCAB))
    bench = Bench(
        speculation=speculation, num_blocks=129, max_model_len=500, max_num_batched_tokens=64
    )
    now = 0.0
    bench.add(request := make_request("a", max_tokens=400))
    in_flight = []
    while bench.scheduler.num_live or bench.in_flight:
        while len(bench.in_flight) < 2 and (plan := bench.scheduler.plan(now)) is not None:
            bench.in_flight.append((bench.engine.submit(plan), plan))
        in_flight.append(len(bench.in_flight))
        step, plan = bench.in_flight.popleft()
        now += 0.01 + 0.01 * plan.rows[0].num_drafts
        for update in bench.scheduler.apply(step.result(None), now):
            bench.tokens.setdefault("a", []).extend(update.token_ids)
    assert bench.tokens["a"] == expected(request)
    ahead = in_flight.count(2) / len(in_flight)
    assert 0.7 < ahead < 1.0
    assert request.drafts.num_rounds > 3
