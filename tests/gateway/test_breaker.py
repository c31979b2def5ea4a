"""A server that fails rests, and comes back by one request that it answers."""

from charonia.gateway.breaker import FIRST_PAUSE_S, MAX_FAILURES, MAX_PAUSE_S, Breaker
from support.waiting import Clock


def failing(breaker: Breaker, times: int = MAX_FAILURES) -> None:
    for _ in range(times):
        breaker.fail(breaker.begin())


def test_it_opens_after_failures_in_a_row_alone() -> None:
    breaker = Breaker(Clock().monotonic)
    for _ in range(10):
        failing(breaker, MAX_FAILURES - 1)
        breaker.succeed()
    assert breaker.admits
    assert not breaker.is_open
    failing(breaker)
    assert breaker.is_open
    assert not breaker.admits
    assert breaker.wait_s == FIRST_PAUSE_S


def test_one_request_tries_it_after_the_pause_and_closes_it() -> None:
    clock = Clock()
    breaker = Breaker(clock.monotonic)
    failing(breaker)
    clock.now += FIRST_PAUSE_S
    assert breaker.admits
    breaker.begin()
    assert not breaker.admits, "one trial at a time"
    breaker.succeed()
    assert breaker.admits
    assert not breaker.is_open


def test_a_trial_that_fails_doubles_the_pause_up_to_a_limit() -> None:
    clock = Clock()
    breaker = Breaker(clock.monotonic)
    failing(breaker)
    pauses = []
    for _ in range(8):
        clock.now += breaker.wait_s
        breaker.fail(breaker.begin())
        pauses.append(breaker.wait_s)
    assert pauses[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S
    clock.now += MAX_PAUSE_S
    breaker.begin()
    breaker.succeed()
    failing(breaker)
    assert breaker.wait_s == FIRST_PAUSE_S, "it starts anew"


def test_a_probe_that_is_answered_ends_a_trial_that_still_runs() -> None:
    clock = Clock()
    breaker = Breaker(clock.monotonic)
    failing(breaker)
    breaker.note_up()
    assert not breaker.admits, "a probe alone does not shorten the pause"
    clock.now += FIRST_PAUSE_S
    trial = breaker.begin()
    assert not breaker.admits
    breaker.note_up()
    assert breaker.admits
    assert not breaker.is_open
    breaker.fail(trial)  # or another request
    assert breaker.wait_s == 2 * FIRST_PAUSE_S, "a probe proves less than an answer"


def test_a_trial_whose_client_leaves_says_nothing_and_another_may_follow() -> None:
    clock = Clock()
    breaker = Breaker(clock.monotonic)
    failing(breaker)
    clock.now += FIRST_PAUSE_S
    breaker.abandon(breaker.begin())
    assert breaker.admits
    assert breaker.is_open


def test_late_failures_of_requests_from_before_do_not_prolong_the_pause() -> None:
    clock = Clock()
    breaker = Breaker(clock.monotonic)
    for request in [breaker.begin() for _ in range(8)]:
        breaker.fail(request)
        clock.now += FIRST_PAUSE_S / 8
    assert breaker.wait_s < FIRST_PAUSE_S


def test_ends_of_requests_from_before_leave_a_trial_as_it_is() -> None:
    clock = Clock()
    breaker = Breaker(clock.monotonic)
    left, failed = breaker.begin(), breaker.begin()
    failing(breaker)
    clock.now += FIRST_PAUSE_S
    trial = breaker.begin()
    breaker.abandon(left)
    assert not breaker.admits, "one trial at a time"
    breaker.fail(failed)
    assert not breaker.admits
    assert breaker.wait_s == 0.0, "the trial has not failed"
    breaker.fail(trial)
    assert breaker.wait_s == 2 * FIRST_PAUSE_S
