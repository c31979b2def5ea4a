"""Who is taken for what an engine dies of."""

import pytest

from charonia.control import Request, Scheduler
from charonia.control.scheduling.poison_detector import PROGRESS, PoisonDetector
from charonia.errors import EngineDiedError
from support.echo import EchoExecutor, echo_run
from support.invariants import check_invariants
from support.scheduling import (
    add_requests,
    make_engine,
    make_request,
    make_scheduler,
    plan_all,
    run_step,
    run_to_end,
)


def die(scheduler: Scheduler, engine: EchoExecutor) -> Request | None:
    """Lose an engine in the middle of a step, and begin on another one; returns who is guilty."""
    scheduler.plan(0.0)
    guilty = scheduler.blame()
    engine.restart()
    scheduler.reset()
    return guilty


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


def test_a_suspect_is_guilty_only_of_what_it_was_in_flight_at():
    """An engine may also die while nothing runs."""
    detector = PoisonDetector()
    requests = [make_request("a"), make_request("b")]
    for request in requests:
        request.num_in_flight = 1
    for _ in range(2):
        assert detector.note_death(requests) is None
    for request in requests:
        request.num_in_flight = 0
    assert detector.note_death(requests) is None
    assert detector.first is requests[0]
    requests[0].num_in_flight = 1
    assert detector.note_death(requests) is requests[0]
