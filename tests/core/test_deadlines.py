"""Points in time: given back in order, once, and never kept for long when nobody needs them."""

from hypothesis import given
from hypothesis import strategies as st

from charonia.core.gate.deadlines import Deadlines


def test_what_is_due_comes_in_order_and_once():
    deadlines = Deadlines()
    deadlines.add("a", 5.0)
    deadlines.add("b", 3.0, is_until_start=True)
    deadlines.add("b", 7.0)
    assert deadlines.take_due(2.9) == []
    assert deadlines.take_due(5.0) == [("b", True), ("a", False)]
    assert deadlines.take_due(6.9) == []
    assert deadlines.take_due(7.0) == [("b", False)]


def test_a_key_that_comes_again_has_nothing_of_the_one_before_it():
    deadlines = Deadlines()
    deadlines.add("a", 1.0)
    deadlines.remove("a")
    deadlines.add("a", 9.0)
    assert deadlines.take_due(8.0) == []
    assert deadlines.take_due(9.0) == [("a", False)]


def test_requests_that_ended_are_not_kept_until_their_time_comes():
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(str(number), 1e6 + number)
        deadlines.add(str(number), 1e3, is_until_start=True)
        if number >= 10:
            deadlines.remove(str(number - 10))
        assert deadlines._heap.num_places < 150


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "due"]), st.integers(0, 9), st.integers(0, 50)),
        max_size=200,
    )
)
def test_it_says_what_a_list_would_say(calls):
    deadlines, listed = Deadlines(), []
    for call, number, when in calls:
        key = str(number)
        if call == "add":
            deadlines.add(key, when)
            listed.append((when, key))
        elif call == "remove":
            deadlines.remove(key)
            listed = [one for one in listed if one[1] != key]
        else:
            due = [one for one in listed if one[0] <= when]
            listed = [one for one in listed if one[0] > when]
            found = deadlines.take_due(when)
            assert sorted(key for key, _ in found) == sorted(key for _, key in due)
