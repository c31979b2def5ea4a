"""Answers that are kept: never more bytes than may be, never longer than their time."""

import sys
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from charonia.config import MIN_ANSWER_BYTES
from charonia.core.answers.answer_store import ENTRY_BYTES, AnswerStore, Pieces
from charonia.core.output.outputs import Chunk
from charonia.protocol import TokenLogprobs

MAX_BYTES, TTL_S = 4 * ENTRY_BYTES, 10.0

puts = st.tuples(st.just("put"), st.integers(0, 6), st.integers(0, ENTRY_BYTES))
gets = st.tuples(st.just("get"), st.integers(0, 6), st.booleans())
waits = st.tuples(st.just("wait"), st.floats(0.0, 6.0), st.none())


@given(st.lists(puts | gets | waits, max_size=60))
def test_it_holds_what_a_list_of_all_answers_would(calls):
    """Against an oracle that remembers everything, in the order of its last use."""
    store = AnswerStore(MAX_BYTES, TTL_S)
    now, known = 0.0, {}  # key: content and end; the last used one is last
    for what, value, extra in calls:
        if what == "wait":
            now += value
            over = [key for key, one in known.items() if one[1] <= now]
            assert sorted(store.expire(now)) == sorted(over)
            for key in over:
                del known[key]
        elif what == "put":
            key, content = bytes([value]), bytes(extra)
            evicted = store.put(key, content, now, has_scores=False)
            known.pop(key, None)
            known[key] = content, now + TTL_S
            over = []
            while sum(len(one[0]) + ENTRY_BYTES for one in known.values()) > MAX_BYTES:
                over.append(next(iter(known)))
                del known[over[-1]]
            assert evicted == over
        else:
            key = bytes([value])
            found = store.get(key, now, needs_scores=extra)
            if extra:
                assert found is None
                continue
            assert (None if found is None else found.content) == known.get(key, (None,))[0]
            if found is not None:
                known[key] = known.pop(key)
        assert len(store) == len(known)
        assert store.num_bytes == sum(len(one[0]) + ENTRY_BYTES for one in known.values())
        assert store.num_bytes <= MAX_BYTES


def test_pieces_are_the_chunks_of_each_sample_joined():
    entry = TokenLogprobs([1, 2], [-0.5, float("-inf")], 1)
    chunks = [
        Chunk("k", "ab", (1, 2), (entry, entry), -1.0, [None, entry], index=0),
        Chunk("k", "x", (9,), (entry,), -0.5, index=1),
        Chunk("k", "c", tuple(range(40)), (entry,) * 40, -2.0, index=0),
        Chunk("k", "y", (8,), (entry,), -1.0, index=1, finish_reason="stop", num_open=1),
        Chunk("k", "", (7,), (entry,), -3.0, index=0, finish_reason="length"),
    ]
    taken = Pieces()
    for number, chunk in enumerate(chunks, 1):
        assert not taken.is_complete(2)
        taken.add(chunk)
        so_far = {one.index: one for one in taken.so_far()}
        for index in (0, 1):
            own = [one for one in chunks[:number] if one.index == index]
            assert so_far.get(index) == (Chunk.merge(own) if own else None)
    assert taken.is_complete(2)
    store = AnswerStore(2**20, 1.0)
    store.put(b"k", taken.encoded(), 0.0, has_scores=True)
    answer = store.get(b"k", 0.0, needs_scores=True)
    assert answer is not None
    pieces = answer.pieces()
    assert [(one.index, one.text, one.finish_reason) for one in pieces] == [
        (0, "abc", None),
        (1, "xy", "stop"),
        (0, "", "length"),
    ]
    assert pieces[0].token_ids == [1, 2, *range(40)]
    assert pieces[0].prompt_logprobs == [None, entry]
    assert pieces[0].logprobs == [entry] * 42
    assert [one.cumulative_logprob for one in pieces] == [-2.0, -1.0, -3.0]


def test_the_fewest_bytes_that_may_be_set_hold_the_smallest_answer_and_no_fewer_do():
    pieces = Pieces()
    pieces.add(Chunk("r", token_ids=(7,), finish_reason="stop"))
    stores = [AnswerStore(size, 1e6) for size in (MIN_ANSWER_BYTES, 813)]
    assert MIN_ANSWER_BYTES == 814
    kept = [store.put(b"k", pieces.encoded(), 0.0, has_scores=False) for store in stores]
    assert kept == [[], None]


def test_what_is_said_of_its_bytes_is_what_it_takes():
    num_answers, content = 2000, 100
    store = AnswerStore(2**30, 1e6)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(num_answers):
        store.put(number.to_bytes(64, "little"), bytes(content), 0.0, has_scores=False)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert sys.getsizeof(b"") + content < taken / num_answers <= content + ENTRY_BYTES
    assert store.num_bytes == num_answers * (content + ENTRY_BYTES)
    assert store.num_bytes <= 2 * taken
