"""Stop strings end a text wherever its portions meet, and hold back no more than needed."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.text.stops import StopMatcher

# Few letters, so that stop strings overlap themselves and each other.
texts = st.text(alphabet="ab日", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab日", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str], include_stop: bool) -> tuple[str, bool]:
    """Find the stop string that is complete first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include_stop else end - max(map(len, ending))], True
    return text, False


def num_to_hold(text: str, stops: list[str]) -> int:
    """Count the characters at the end of a text that can still become a stop string."""
    return max(
        (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0
    )


@given(text=texts, stops=stop_lists, include=st.booleans(), cuts=st.lists(st.integers(0, 24)))
@settings(max_examples=500)
def test_the_text_and_what_is_held_back_do_not_depend_on_the_portions(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    emitted, seen = "", ""
    borders = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    for begin, end in itertools.pairwise(borders):
        emitted += matcher.add(text[begin:end])
        seen = text[:end]
        so_far, is_stopped = expected(seen, stops, include)
        assert matcher.stopped == is_stopped
        if is_stopped:
            assert emitted == so_far
        else:
            assert emitted == seen[: len(seen) - num_to_hold(seen, stops)]
    emitted += matcher.finish()
    assert (emitted, matcher.stopped) == expected(text, stops, include)


@pytest.mark.parametrize(("include_stop", "end"), [(False, ""), (True, "</end>")])
def test_a_stop_string_across_three_portions_is_found(include_stop: bool, end: str) -> None:
    matcher = StopMatcher(["</end>"], include_stop=include_stop)
    assert [matcher.add(text) for text in ("some <", "/en", "d> more")] == ["some ", "", end]
    assert matcher.stopped
    assert matcher.add("even more") == ""
    assert matcher.finish() == ""


def test_what_turns_out_to_be_no_stop_string_is_given_out_at_once() -> None:
    matcher = StopMatcher(["abac"], include_stop=False)
    # After "abab" the second "ab" can still begin the stop string, the first cannot.
    assert [matcher.add(char) for char in "ababacx"] == ["", "", "", "ab", "", "", ""]
    assert matcher.stopped


def test_the_stop_string_that_is_complete_first_wins() -> None:
    matcher = StopMatcher(["abcd", "bc"], include_stop=False)
    assert matcher.add("xabcd") == "xa"
    matcher = StopMatcher(["abc", "bc", "c"], include_stop=False)
    assert matcher.add("xabcd") == "x"


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher([], include_stop=False)
    assert matcher.add("text") == "text"
    assert not matcher.stopped
    assert matcher.finish() == ""


def test_the_beginning_of_a_stop_string_at_the_end_of_the_text_is_released() -> None:
    matcher = StopMatcher(["END"], include_stop=False)
    assert matcher.add("the EN") == "the "
    assert matcher.finish() == "EN"
    assert not matcher.stopped
