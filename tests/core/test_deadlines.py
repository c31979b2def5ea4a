"""Points in time: given back in order, once, and never kept for long when nobody needs them."""

from hypothesis import given
from hypothesis import strategies as st

from charonia.core.gate.deadlines import Deadlines
from charonia.core.generation_request import GenerationRequest
from charonia.protocol import SamplingParams


def request(*, until_start: int | None = None, until_end: int | None = None) -> GenerationRequest:
    """A request with these timeouts, in seconds."""
    deadline_ms = None if until_end is None else 1000 * until_end
    return GenerationRequest(
        key="k",
        prompt_ids=[1],
        params=SamplingParams(deadline_ms=deadline_ms),
        timeout_s=until_start,
    )


def test_what_is_due_comes_in_order_and_once():
    deadlines = Deadlines()
    deadlines.add(1, request(until_end=5), 0.0)
    deadlines.add(2, request(until_start=2, until_end=6), 1.0)
    assert deadlines.take_due(2.9) == []
    assert deadlines.take_due(5.0) == [(2, True), (1, False)]
    assert deadlines.take_due(6.9) == []
    assert deadlines.take_due(7.0) == [(2, False)]


def test_of_two_that_are_due_at_once_the_one_until_the_start_comes_first():
    deadlines = Deadlines()
    deadlines.add(1, request(until_start=2, until_end=2), 0.0)
    assert deadlines.take_due(2.0) == [(1, True), (1, False)]


def test_requests_that_time_out_at_once_come_by_their_numbers():
    deadlines = Deadlines()
    for number in reversed(range(10)):
        deadlines.add(number, request(until_end=1), 0.0)
    assert deadlines.take_due(1.0) == [(number, False) for number in range(10)]


def test_a_number_that_comes_again_has_nothing_of_the_one_before_it():
    deadlines = Deadlines()
    deadlines.add(1, request(until_end=1), 0.0)
    deadlines.remove(1)
    deadlines.add(1, request(until_end=9), 0.0)
    assert deadlines.take_due(8.0) == []
    assert deadlines.take_due(9.0) == [(1, False)]


def test_requests_that_ended_are_not_kept_until_their_time_comes():
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(number, request(until_start=1000, until_end=10**6 + number), 0.0)
        if number >= 10:
            deadlines.remove(number - 10)
        assert deadlines._heap.num_places < 150


TIMES = st.none() | st.integers(1, 50)


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "due"]), st.integers(0, 9), TIMES, TIMES),
        max_size=200,
    )
)
def test_it_says_what_a_list_would_say(calls):
    deadlines, listed = Deadlines(), []
    for call, number, until_start, until_end in calls:
        if call == "add" and number not in [one[1] for one in listed]:
            deadlines.add(number, request(until_start=until_start, until_end=until_end), 0.0)
            listed += [(until_start, number, True)] if until_start is not None else []
            listed += [(until_end, number, False)] if until_end is not None else []
        elif call == "remove":
            deadlines.remove(number)
            listed = [one for one in listed if one[1] != number]
        elif call == "due":
            now = until_start or 0
            due = [one for one in listed if one[0] <= now]
            listed = [one for one in listed if one[0] > now]
            found = deadlines.take_due(now)
            due.sort(key=lambda one: (one[0], one[1], not one[2]))
            assert found == [(one, is_until_start) for _, one, is_until_start in due]
