"""A heap that any key can leave: in order whatever leaves and comes back, and never much larger."""

from hypothesis import given
from hypothesis import strategies as st

from charonia.control.lazy_heap import LazyHeap


def heap_of(**scores: float) -> LazyHeap[str]:
    heap: LazyHeap[str] = LazyHeap()
    for key, score in scores.items():
        heap.add(key, score)
    return heap


def drained(heap: LazyHeap[str]) -> str:
    """All keys in their order, which are gone then."""
    keys = ""
    while (place := heap.first()) is not None:
        keys += place[1]
        heap.pop()
    return keys


def test_the_smallest_score_is_first_and_equals_come_in_the_order_of_their_keys():
    heap = heap_of(d=2.0, b=1.0, a=2.0, c=0.0)
    assert heap.first() == (0.0, "c")
    assert drained(heap) == "cbad"
    assert heap.first() is None


def test_what_has_left_is_passed_over_and_may_come_back_with_any_score():
    heap = heap_of(a=1.0, b=2.0, c=3.0, d=0.0)
    for key in "adx":
        heap.discard(key)
    assert heap.first() == (2.0, "b")
    heap.discard("b")
    heap.add("b", 9.0)
    heap.discard("c")
    heap.add("c", 3.0)  # it has two places now that are alike
    heap.add("a", 5.0)
    assert drained(heap) == "cab"


def test_the_first_one_goes_back_to_where_a_larger_score_belongs():
    heap = heap_of(a=1.0, b=2.0, c=3.0)
    assert heap.first() == (1.0, "a")
    heap.raise_first(2.5)
    assert drained(heap) == "bac"


def test_a_raised_one_leaves_no_place_behind_that_counts():
    heap = heap_of(a=1.0)
    heap.discard("a")
    heap.add("a", 1.0)
    assert heap.first() == (1.0, "a")
    heap.raise_first(2.0)
    assert heap.first() == (2.0, "a")
    assert heap.num_places == 1


def test_stale_places_are_dropped_when_they_outweigh_the_others():
    heap: LazyHeap[int] = LazyHeap()
    for number in range(1000):
        heap.add(number, number)
    for number in range(999, 9, -1):
        heap.discard(number)
        assert heap.num_places <= 2 * number + 64
    assert heap.first() == (0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["toggle", "toggle", "pop", "raise"]),
            st.sampled_from("abcdef"),
            st.integers(0, 9),
        ),
        max_size=200,
    )
)
def test_it_is_what_a_dictionary_that_is_searched_would_be(calls):
    heap, scores = heap_of(), dict[str, float]()
    for call, key, score in calls:
        if call == "toggle" and key in scores:
            del scores[key]
            heap.discard(key)
        elif call == "toggle":
            scores[key] = score
            heap.add(key, score)
        elif scores and call == "pop":
            assert heap.first() is not None
            heap.pop()
            del scores[min(scores, key=lambda one: (scores[one], one))]
        elif scores:
            (least, first) = heap.first()
            scores[first] = least + score
            heap.raise_first(least + score)
        smallest = min(((score, key) for key, score in scores.items()), default=None)
        assert heap.first() == smallest
