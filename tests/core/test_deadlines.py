"""Points in time: given back in order, once, and never kept for long when nobody needs them."""

from hypothesis import given
from hypothesis import strategies as st

from charonia.core.gate.deadlines import Deadlines
from charonia.core.generation_request import GenerationRequest
from charonia.protocol import SamplingParams


def request(key: str, *, until_start: int | None = None, until_end: int | None = None):
    """A request with these timeouts, in seconds."""
    deadline_ms = None if until_end is None else 1000 * until_end
    return GenerationRequest(
        key=key,
        prompt_ids=[1],
        params=SamplingParams(deadline_ms=deadline_ms),
        timeout_s=until_start,
    )


def test_what_is_due_comes_in_order_and_once():
    deadlines = Deadlines()
    deadlines.add(request("a", until_end=5), 0.0)
    deadlines.add(request("b", until_start=2, until_end=6), 1.0)
    assert deadlines.take_due(2.9) == []
    assert deadlines.take_due(5.0) == [("b", True), ("a", False)]
    assert deadlines.take_due(6.9) == []
    assert deadlines.take_due(7.0) == [("b", False)]


def test_of_two_that_are_due_at_once_the_one_until_the_start_comes_first():
    deadlines = Deadlines()
    deadlines.add(request("a", until_start=2, until_end=2), 0.0)
    assert deadlines.take_due(2.0) == [("a", True), ("a", False)]


def test_a_key_that_comes_again_has_nothing_of_the_one_before_it():
    deadlines = Deadlines()
    deadlines.add(request("a", until_end=1), 0.0)
    deadlines.remove("a")
    deadlines.add(request("a", until_end=9), 0.0)
    assert deadlines.take_due(8.0) == []
    assert deadlines.take_due(9.0) == [("a", False)]


def test_requests_that_ended_are_not_kept_until_their_time_comes():
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(request(str(number), until_start=1000, until_end=10**6 + number), 0.0)
        if number >= 10:
            deadlines.remove(str(number - 10))
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
        key = str(number)
        if call == "add" and key not in [one[1] for one in listed]:
            deadlines.add(request(key, until_start=until_start, until_end=until_end), 0.0)
            listed += [(until_start, key, True)] if until_start is not None else []
            listed += [(until_end, key, False)] if until_end is not None else []
        elif call == "remove":
            deadlines.remove(key)
            listed = [one for one in listed if one[1] != key]
        elif call == "due":
            now = until_start or 0
            due = [one for one in listed if one[0] <= now]
            listed = [one for one in listed if one[0] > now]
            found = deadlines.take_due(now)
            assert sorted(found) == sorted((key, is_until_start) for _, key, is_until_start in due)
