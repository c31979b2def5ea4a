"""Prompt lookup: the latest earlier n-gram is found, and continued as the text went on there."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import support.requests
from charonia.control.drafts import ngram
from charonia.control.drafts.ngram import NgramDrafter
from charonia.control.state.request import Request


def make_request(token_ids: Sequence[int], key: str = "a") -> Request:
    return support.requests.make_request(token_ids, key)


def propose_by_scanning(
    token_ids: list[int], smallest: int, largest: int, max_tokens: int
) -> list[int]:
    for n in range(largest, smallest - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == token_ids[-n:]:
                text = list(token_ids)
                for i in range(max_tokens):
                    text.append(text[end + i])
                return text[len(token_ids) :]
    return []


texts = st.lists(st.integers(0, 2), min_size=1, max_size=60)
sizes = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda n: (n[0], n[0] + n[1]))


@given(texts, st.lists(texts, max_size=8), sizes, st.integers(1, 12))
def test_a_proposal_equals_what_scanning_the_text_finds(prompt, appended, sizes, max_tokens):
    drafter = NgramDrafter(*sizes)
    request = make_request(prompt)
    for token_ids in [[], *appended]:
        request.token_ids += token_ids
        expected = propose_by_scanning(request.token_ids, *sizes, max_tokens)
        assert drafter.propose(request, max_tokens) == expected


def test_the_longest_n_gram_wins_over_a_later_shorter_one():
    text = [1, 2, 3, 70, 9, 2, 3, 80, 9, 1, 2, 3]
    assert NgramDrafter(2, 3).propose(make_request(text), 1) == [70]
    assert NgramDrafter(2, 2).propose(make_request(text), 1) == [80]


def test_the_end_of_the_text_does_not_match_itself():
    drafter = NgramDrafter(1, 3)
    request = make_request([1, 2, 3])
    assert drafter.propose(request, 4) == []
    assert drafter.propose(request, 4) == []


def test_a_text_that_repeats_itself_gets_drafts_of_full_length():
    drafter = NgramDrafter(2, 4)
    assert drafter.propose(make_request([9, 1, 2, 3, 1, 2]), 7) == [3, 1, 2, 3, 1, 2, 3]
    assert drafter.propose(make_request([5, 5, 5], "b"), 5) == [5] * 5


def test_a_text_shorter_than_the_n_gram_gets_no_drafts():
    assert NgramDrafter(3, 5).propose(make_request([1, 1]), 4) == []


def test_requests_do_not_see_each_other():
    drafter = NgramDrafter(1, 2)
    drafter.propose(make_request([1, 2, 3, 1, 2], "a"), 4)
    assert drafter.propose(make_request([1, 2], "b"), 4) == []


def test_nothing_is_kept_of_a_request_that_ended():
    drafter = NgramDrafter(1, 2)
    request = make_request([1, 2, 3, 1], "a")
    drafter.propose(request, 4)
    drafter.forget(request)
    drafter.forget(make_request([1], "never proposed"))
    assert not drafter._indices


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3)])
def test_a_long_prompt_is_indexed_over_several_proposals(sizes, monkeypatch):
    for name in ("MAX_CATCH_UP", "MIN_CATCH_UP"):
        monkeypatch.setattr(ngram, name, 10)
    drafter = NgramDrafter(*sizes)
    request = make_request([*range(25), 7, 7, 7, 23, 24])  # 23, 24 end within the first 25
    assert [drafter.propose(request, 1) for _ in range(4)] == [[], [], [7], [7]]


def test_a_step_indexes_so_many_tokens_and_then_a_few_of_each_request(monkeypatch):
    monkeypatch.setattr(ngram, "MAX_CATCH_UP", 10)
    monkeypatch.setattr(ngram, "MIN_CATCH_UP", 3)
    drafter = NgramDrafter(2, 2)
    texts = [make_request(range(40), "a"), make_request(range(40), "b")]
    for step in (1, 2):
        drafter.begin_step()
        for request in texts:
            drafter.propose(request, 1)
        assert [drafter._indices[request].num_indexed for request in texts] == [10 * step, 3 * step]
