"""Earliest deadline first: who is next, who displaces whom, and who cannot be in time any more."""

from dataclasses import replace
from math import inf

import pytest

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.estimators.remaining_time import RemainingTime
from charonia.control.policies import (
    DeadlineWatch,
    DisplacementByDeadline,
    Policy,
    by_deadline,
    fair,
    ranked,
)
from charonia.control.policies.deadline import MAX_LOOKED_UP
from support.stepping import LIMITS, Bench, make_request

STEP_S = 0.001  # of the echo engine
BUDGET = 64


def edf(*, demotes: bool = False) -> Policy:
    watch = DeadlineWatch(demotes=demotes)
    return ranked(by_deadline, DisplacementByDeadline(), watch)


def make_remaining(lengths: OutputLengths | None = None) -> RemainingTime:
    prompt_time = PromptTime()
    prompt_time.start_epoch(replace(LIMITS, max_num_batched_tokens=BUDGET))
    return RemainingTime(lengths or OutputLengths(), prompt_time)


def make_watch(*, demotes: bool = False) -> DeadlineWatch:
    watch = DeadlineWatch(demotes=demotes)
    watch._remaining = make_remaining()
    return watch


def note_step(remaining: RemainingTime, num_tokens: int, seconds: float) -> None:
    remaining._prompt_time.note_step(num_tokens, 0, 0, 0, seconds)
    remaining.note_step(seconds)


def due(key: str, expires_at: float = inf, **changes):
    return make_request(key, expires_at=expires_at, **changes)


def nothing(request) -> int:
    """What the prefix cache has of it."""
    return 0


def test_the_earliest_deadline_is_next_and_who_has_none_comes_last_in_order_of_arrival():
    bench = Bench(edf(), max_num_seqs=1)
    bench.add(due("a"), due("b"), due("c", 9.0), due("d", 5.0))
    assert bench.ends() == ["d", "c", "a", "b"]


def test_an_earlier_deadline_takes_the_row_of_a_later_one_and_equals_take_none():
    bench = Bench(edf(), max_num_seqs=1)
    bench.add(due("a", 9.0))
    bench.step()
    bench.add(due("b", 9.0), due("c"))
    bench.step()
    assert bench.running == {"a"}
    bench.add(due("d", 8.0))
    bench.step()
    assert bench.running == {"d"}
    assert bench.ends() == ["d", "a", "b", "c"]


def test_before_the_first_step_only_a_deadline_that_is_over_cannot_be_met():
    bench = Bench(edf())
    bench.add(due("a", 1.0, max_tokens=50))
    bench.step(now=0.99)
    assert bench.scheduler.take_late() == []
    bench = Bench(edf())
    bench.add(due("a", 1.0))
    assert bench.scheduler.plan(1.01) is None
    (late,) = bench.scheduler.take_late()
    assert late.request.key == "a"
    assert late.left_s == pytest.approx(-0.01)
    assert bench.scheduler.num_live == 0
    assert bench.scheduler.take_late() == []


@pytest.mark.parametrize("demotes", [False, True])
def test_who_waits_beyond_its_latest_start_ends_or_goes_behind_all_others(demotes):
    bench = Bench(edf(demotes=demotes), max_num_seqs=1)
    bench.add(due("a", max_tokens=40))
    for _ in range(12):  # what a step takes is learned from some
        bench.step()
    latest = 1.0 - 20 * STEP_S
    bench.add(due("b", 1.0, max_tokens=20), due("c", 2.0, max_tokens=20))
    bench.scheduler.finish("a")
    bench.add(due("d", 0.5))
    bench.step(now=0.1)
    assert bench.running == {"d"}
    bench.step(now=latest - 0.002)
    assert bench.scheduler.take_late() == []
    bench.step(now=latest + 0.002)
    late = bench.scheduler.take_late()
    if demotes:
        assert late == []
        assert bench.ends() == ["d", "c", "b"]
    else:
        assert [(one.request.key, one.request.is_ended) for one in late] == [("b", True)]
        assert late[0].needed_s == pytest.approx(20 * STEP_S, rel=0.1)
        assert late[0].left_s == pytest.approx(20 * STEP_S - 0.002)
        assert bench.ends() == ["d", "c"]


def make_mistaken() -> Bench:
    """A bench of which all is known from one long answer, and that is idle."""
    bench = Bench(edf(), num_blocks=200, max_model_len=500)
    bench.add(due("a", max_tokens=300))
    bench.ends()
    return bench


def outcomes(bench: Bench, now: float) -> tuple[set[str], set[str]]:
    """Who is told that it is late in a step, and who runs in it."""
    plan = bench.scheduler.plan(now)
    running = set(bench.running)
    if plan is not None:
        bench.scheduler.apply(bench.engine.submit(plan).result(None), now)
    return {late.request.key for late in bench.scheduler.take_late()}, running


def test_on_an_idle_engine_who_is_expected_to_be_late_is_tried_and_so_it_is_seen_that_it_is_not():
    """Else nobody would run, and what is expected would never change."""
    bench = make_mistaken()
    for number in range(40):
        bench.add(due(f"b{number}", 0.1, max_tokens=250))
        assert outcomes(bench, 0.0) == (set(), {f"b{number}"})
        bench.step()
        bench.scheduler.finish(f"b{number}", is_complete=True)  # at a stop string
    for key in "cd":  # one alone would be tried in any case
        bench.add(due(key, 0.1, max_tokens=250))
    assert outcomes(bench, 0.0) == (set(), {"c", "d"}), "answers are short"


def test_of_several_late_ones_one_is_tried_that_lacks_the_least_time():
    bench = make_mistaken()
    bench.add(due("b", 0.1, max_tokens=250), due("c", 0.2, max_tokens=250), due("d", 0.0))
    assert outcomes(bench, 0.01) == ({"b", "d"}, {"c"})
    bench.add(due("e", 0.1, max_tokens=250))
    assert outcomes(bench, 0.01) == ({"e"}, {"c"}), "there is one that runs"


def test_nobody_is_tried_after_its_deadline_or_where_another_one_waits():
    bench = make_mistaken()
    bench.add(due("b", 0.1, max_tokens=250))
    assert outcomes(bench, 0.11) == ({"b"}, set())
    bench.add(due("c", 0.2, max_tokens=250), due("d"))
    assert outcomes(bench, 0.11) == ({"c"}, {"d"})


def test_one_that_is_tried_and_gets_no_row_is_late_when_its_time_is_over():
    """A suspect is in its way, for example."""
    bench = make_mistaken()
    bench.add(due("b", 0.1, max_tokens=250))
    for now in (0.0, 0.05):
        bench.scheduler._give_up_late(bench.scheduler._policy.deadlines, now)
        assert bench.scheduler.take_late() == []
    bench.scheduler._give_up_late(bench.scheduler._policy.deadlines, 0.11)
    assert [late.request.key for late in bench.scheduler.take_late()] == ["b"]


def test_answers_that_are_cut_off_make_others_not_seem_short():
    """Else only the short ones would count where deadlines end the long ones."""
    bench = make_mistaken()
    for number in range(40):
        bench.add(due(f"b{number}", max_tokens=5), due(f"c{number}", max_tokens=300))
        for _ in range(8):
            bench.step()
        assert bench.running == {f"c{number}"}
        bench.scheduler.finish(f"c{number}")  # at its deadline
    bench.add(due("d", 0.1, max_tokens=250), due("e", 0.11, max_tokens=250))
    assert outcomes(bench, 0.0) == ({"d"}, {"e"}), "one is tried"


def test_on_an_idle_engine_who_is_demoted_runs_as_well():
    policy = edf(demotes=True)
    bench = Bench(policy, num_blocks=200, max_model_len=500)
    bench.add(due("a", max_tokens=300))
    bench.ends()
    bench.add(due("b", 0.1, max_tokens=250))
    assert outcomes(bench, 0.0) == (set(), {"b"})
    (request,) = bench.scheduler.requests
    assert request.is_demoted


def test_who_runs_or_has_ended_is_not_late_and_who_was_preempted_may_be():
    bench = Bench(edf(), max_num_seqs=1)
    bench.add(due("a", 1.0, max_tokens=30), due("b", 1.5))
    for _ in range(4):
        bench.step()
    bench.scheduler.finish("b")
    bench.add(due("c", 0.5, max_tokens=30))
    bench.step()
    assert bench.running == {"c"}
    bench.step(now=2.0)
    assert [late.request.key for late in bench.scheduler.take_late()] == ["a"]
    assert bench.running == {"c"}


def test_a_latest_start_is_looked_at_again_when_it_has_come():
    watch = make_watch()
    for _ in range(50):
        note_step(watch._remaining, 1, 0.1)
    watch.note_waiting(request := due("a", 10.0, max_tokens=60))
    for _ in range(200):
        note_step(watch._remaining, 1, 0.05)
    assert watch.take_late(5.0, nothing) == []
    (late,) = watch.take_late(8.0, nothing)
    assert late.request is request
    assert late.needed_s == pytest.approx(60 * 0.05, rel=0.1)
    assert watch.take_late(8.0, nothing) == []


def test_rounding_makes_nobody_looked_at_for_ever():
    """A deadline less what is needed may be before now, and what is needed no more than is left."""
    now, expires_at, needed_s = 0.671, 32.97, 32.299
    assert expires_at - needed_s < now
    assert needed_s <= expires_at - now
    watch = make_watch()
    for _ in range(2):
        note_step(watch._remaining, 8, needed_s)
    watch.note_waiting(request := due("a", expires_at, max_tokens=1))
    assert [late.request for late in watch.take_late(now, nothing)] == [request]


def test_what_waits_no_longer_is_forgotten():
    """Long before its deadline; what is left of it is outweighed by those that wait."""
    watch = make_watch()
    stays = [due("a", 1e6, number=number) for number in range(10)]
    for request in stays:
        watch.note_waiting(request)
    for number in range(10, 1000):
        request = due("b", 1e6, number=number)
        for _ in range(2):  # it was preempted
            watch.note_waiting(request)
            watch.note_leaving(request)
        assert watch._heap.num_places <= 2 * 11 + 64
    told = [one.request for _ in range(3) for one in watch.take_late(2e6, nothing)]
    assert told == stays


def test_the_scheduler_tells_who_waits_no_longer():
    policy = edf()
    bench = Bench(policy, max_num_seqs=1)
    bench.add(due("a", 1e6), due("b", 1e6), due("c", 1e6))
    bench.step()
    bench.scheduler.finish("b")
    assert [one.key for one in policy.deadlines._waiting.values()] == ["c"]


def test_one_that_was_demoted_is_told_of_once():
    watch = make_watch(demotes=True)
    request = due("a", 1.0)
    for _ in range(2):  # it was preempted
        watch.note_waiting(request)
    assert [late.request for late in watch.take_late(2.0, nothing)] == [request]
    request.is_demoted = True
    watch.note_waiting(request)
    assert watch.take_late(2.0, nothing) == []


def test_in_one_step_few_prompts_are_looked_up():
    looked_up = []

    def none_of_it(request) -> int:
        looked_up.append(request)
        return 0

    watch = make_watch()
    for number in range(3 * MAX_LOOKED_UP):
        watch.note_waiting(due("a", 1.0, number=number))
    told = [len(watch.take_late(2.0, none_of_it)) for _ in range(4)]
    assert told == [MAX_LOOKED_UP] * 3 + [0]
    assert len(looked_up) == 3 * MAX_LOOKED_UP


def test_what_is_not_cached_any_more_is_looked_up_again():
    num_cached = 20 * BUDGET - 1
    watch = make_watch()
    for _ in range(50):
        note_step(watch._remaining, BUDGET, 0.1)
        note_step(watch._remaining, 1, 0.01)
    watch.note_waiting(request := due("a", 10.0, token_ids=[5] * (20 * BUDGET), max_tokens=1))
    assert watch.take_late(9.0, lambda _: num_cached) == []
    num_cached = 10 * BUDGET
    (late,) = watch.take_late(9.995, lambda _: num_cached)
    assert late.request is request
    assert late.needed_s == pytest.approx(1.0, rel=0.1)


def test_what_is_cached_is_looked_up_only_where_it_matters():
    looked_up = []

    def all_but_one(request) -> int:
        looked_up.append(request)
        return len(request.token_ids) - 1

    watch = make_watch()
    for _ in range(50):
        note_step(watch._remaining, BUDGET, 0.1)
        note_step(watch._remaining, 1, 0.01)
    request = due("a", 10.0, token_ids=[5] * (20 * BUDGET), max_tokens=1)
    watch.note_waiting(request)
    assert watch.take_late(7.9, all_but_one) == []
    assert looked_up == []
    assert watch.take_late(9.9, all_but_one) == []
    (late,) = watch.take_late(9.995, all_but_one)
    assert late.needed_s == pytest.approx(0.01, rel=0.1)
    assert looked_up == [request] * 2


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_prompt_that_is_cached_is_in_time_when_another_would_not_be(is_cached):
    policy = ranked(by_deadline, None, DeadlineWatch(demotes=False))
    bench = Bench(policy, max_num_seqs=1, max_num_batched_tokens=8)
    prompt = list(range(41))
    bench.add(due("a", token_ids=prompt, max_tokens=4))
    bench.ends()
    if not is_cached:
        prompt = prompt[::-1]
    bench.add(due("b", 1.0, token_ids=prompt, max_tokens=1), due("c"))
    bench.scheduler.plan(1.0 - 3 * STEP_S)
    late = [one.request.key for one in bench.scheduler.take_late()]
    assert late == ([] if is_cached else ["b"])


def test_within_fair_shares_late_ones_end_as_well():
    watch = DeadlineWatch(demotes=False)
    bench = Bench(fair(by_deadline, lambda tenant: 1.0, None, watch), max_num_seqs=1)
    bench.add(due("a", 5.0, tenant="x"), due("b", 1.0, tenant="x"), due("c", 0.5, tenant="y"))
    bench.step(now=0.7)
    assert [late.request.key for late in bench.scheduler.take_late()] == ["c"]
    assert bench.ends() == ["b", "a"]


def test_an_answer_is_taken_to_be_as_long_as_others_but_not_longer_than_asked_for():
    lengths = OutputLengths()
    remaining = make_remaining(lengths)
    request = make_request("a", max_tokens=100)
    assert remaining.of(request) == 0.0
    for _ in range(50):
        note_step(remaining, 8, 0.01)
    assert remaining.of(request) == pytest.approx(1.0, rel=0.01)
    lengths.note(10)
    assert remaining.of(request) == pytest.approx(0.1, rel=0.01)
    request.token_ids += [7] * 30
    assert remaining.of(request) <= 0.06  # its tokens are computed again, and one more comes
    assert remaining.of(make_request("c", max_tokens=2)) == pytest.approx(0.02, rel=0.01)


def test_an_answer_takes_fewer_steps_than_tokens_where_drafts_are_accepted():
    lengths = OutputLengths()
    remaining = make_remaining(lengths)
    for _ in range(50):
        note_step(remaining, 8, 0.01)
    lengths.note(100, 75)
    request = make_request("b", max_tokens=100)
    assert remaining.of(request) == pytest.approx(0.01 + 99 * 0.01 / 4, rel=0.01)


def test_an_answer_that_is_longer_than_most_is_taken_to_be_as_long_as_the_longer_ones():
    lengths = OutputLengths()
    remaining = make_remaining(lengths)
    for _ in range(50):
        note_step(remaining, 8, 0.01)
    for num_tokens in (10, 10, 10, 90):
        lengths.note(num_tokens)
    request = make_request("a", max_tokens=100)
    assert remaining.of(request) == pytest.approx(0.3, rel=0.01)
    request.token_ids += [7] * 50  # it was preempted
    assert remaining.of(request) == pytest.approx(0.4, rel=0.01), "and not one more token"


def test_a_long_prompt_takes_steps_of_its_own():
    remaining = make_remaining()
    for _ in range(50):
        note_step(remaining, BUDGET, 0.05)
        note_step(remaining, 8, 0.01)
    two_steps = make_request("a", token_ids=[5] * (2 * BUDGET), max_tokens=1)
    assert remaining.of(two_steps) == pytest.approx(0.1, rel=0.1)
    and_some = make_request("b", token_ids=[5] * (2 * BUDGET + 8), max_tokens=1)
    assert remaining.of(and_some) == pytest.approx(0.11, rel=0.1)
