"""Suffix decoding: the longest match is found, in the right texts, and memory is bounded."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import support.requests
from charonia.control.drafts import suffix
from charonia.control.drafts.suffix import SuffixAutomaton, SuffixDrafter
from charonia.control.state.request import Request

SHARED = b"tenant"


def make_request(token_ids: Sequence[int], key: str = "live", scope: bytes = SHARED) -> Request:
    return support.requests.make_request(token_ids, key, cache_scope=scope)


def respond(drafter: SuffixDrafter, response: list[int], scope: bytes = SHARED) -> None:
    """A request with a prompt of one token answers and ends."""
    request = make_request([-2], "ended", scope)
    request.token_ids += response
    drafter.forget(request)
    drafter.begin_step()


def longest_match(text: list[int], context: list[int]) -> tuple[int, list[int]]:
    """By scanning: the longest suffix of `context` in `text` that a token of it follows.

    Returns:
        Its length, and the positions after each of its occurrences.
    """
    for length in range(len(context), 0, -1):
        wanted = context[-length:]
        ends = range(length, len(text))
        found = [end for end in ends if text[end - length : end] == wanted]
        if found:
            return length, found
    return 0, []


def continue_in_period(text: list[int], start: int, num_tokens: int) -> list[int]:
    longer = list(text)
    for i in range(num_tokens):
        longer.append(longer[start + i])
    return longer[len(text) :]


texts = st.lists(st.integers(0, 2), min_size=1, max_size=50)
responses = st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=30), max_size=5)

# ---------------------------------------------------------------------- the automaton


@given(st.lists(texts, min_size=1, max_size=5), st.lists(st.integers(0, 3), max_size=40))
def test_the_longest_match_equals_what_scanning_the_texts_finds(all_texts, context):
    automaton, joined = SuffixAutomaton(), []
    for text in all_texts:
        automaton.extend(text)
        automaton.start_text()
        joined += [*text, -1]
    substrings = {
        tuple(text[i:j]) for text in all_texts for j in range(len(text) + 1) for i in range(j)
    }
    state, length = 0, 0
    for i, token in enumerate(context, 1):
        state, length = automaton.advance(automaton.settle(state, length), length, token)
        lengths = (n for n in range(i, 0, -1) if tuple(context[i - n : i]) in substrings)
        assert length == next(lengths, 0)
        matched, position = automaton.continued(state, length)
        context_now = context[i - length : i]
        assert matched == max(longest_match(text, context_now)[0] for text in all_texts)
        if matched:
            assert joined[position - matched : position] == context[i - matched : i]
            assert joined[position] != -1


@given(texts, st.lists(texts, max_size=5))
def test_a_match_stays_one_while_texts_are_added(context, all_texts):
    automaton, joined = SuffixAutomaton(), []
    state, length = 0, 0
    for i, token in enumerate(context, 1):
        if all_texts and i % 5 == 0:
            text = all_texts.pop()
            automaton.extend(text)
            automaton.start_text()
            joined += [*text, -1]
        state, length = automaton.advance(automaton.settle(state, length), length, token)
        matched, position = automaton.continued(state, length)
        assert matched <= length <= i
        assert joined[position - matched : position] == context[i - matched : i]


@given(st.lists(texts, min_size=1, max_size=3))
def test_tokens_can_come_in_pieces(pieces):
    at_once, piecewise = SuffixAutomaton(), SuffixAutomaton()
    at_once.extend([token for piece in pieces for token in piece])
    for piece in pieces:
        piecewise.extend(piece)
    assert all(getattr(at_once, name) == getattr(piecewise, name) for name in at_once.__slots__)


def test_equal_texts_share_their_states():
    automaton = SuffixAutomaton()
    for _ in range(10):
        automaton.extend([1, 2, 3, 4, 1, 2, 5])
        automaton.start_text()
    assert len(automaton._lengths) <= 2 * 7
    assert automaton.continued(*automaton.advance(0, 0, 4)) == (1, 9 * 8 + 4)


# ---------------------------------------------------------------------- a request's own tokens


@given(texts, st.lists(texts, max_size=5), st.integers(1, 12))
def test_a_draft_follows_the_longest_repeated_suffix_and_is_no_longer(prompt, appended, most):
    drafter = SuffixDrafter()
    request = make_request(prompt)
    for token_ids in [[], *appended]:
        request.token_ids += token_ids
        known = request.token_ids
        length, ends = longest_match(known, known)
        allowed = [continue_in_period(known, end, min(length, most)) for end in ends] or [[]]
        assert drafter.propose(request, most) in allowed


def test_a_draft_is_the_most_recent_continuation():
    random = Random(1)
    drafter = SuffixDrafter()
    request = make_request([0])
    for _ in range(150):
        request.token_ids.append(random.randrange(4))
        length, ends = longest_match(request.token_ids, request.token_ids)
        if length:
            expected = continue_in_period(request.token_ids, ends[-1], length)
            assert drafter.propose(request, 100) == expected


def test_the_end_of_the_text_does_not_match_itself():
    drafter = SuffixDrafter()
    request = make_request([1, 2, 3])
    assert drafter.propose(request, 4) == []
    assert drafter.propose(request, 4) == []


def test_a_text_that_repeats_itself_gets_drafts_of_full_length():
    drafter = SuffixDrafter()
    assert drafter.propose(make_request([9, 1, 2, 3, 1, 2, 3, 1, 2]), 7) == [3, 1, 2, 3, 1]
    assert drafter.propose(make_request([5] * 20, "b"), 7) == [5] * 7


def test_a_long_prompt_is_indexed_over_several_proposals(monkeypatch):
    for name in ("MAX_CATCH_UP", "MIN_CATCH_UP"):
        monkeypatch.setattr(suffix, name, 10)
    drafter = SuffixDrafter()
    respond(drafter, [30, 31, 32, 33, 34, 35, 36, 37])
    request = make_request([*range(25), 30])
    assert [drafter.propose(request, 1) for _ in range(2)] == [[31], [31]]
    request.token_ids += [23, 24, 7, 24]
    assert [drafter.propose(request, 1) for _ in range(2)] == [[7], [7]]


def test_a_step_indexes_so_many_tokens_and_then_a_few_of_each_request(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_CATCH_UP", 10)
    monkeypatch.setattr(suffix, "MIN_CATCH_UP", 3)
    drafter = SuffixDrafter()
    drafter.begin_step()
    texts = [make_request([1, 2] * 20, "a"), make_request([1, 2] * 20, "b")]
    for step in (1, 2):
        drafter.begin_step()
        for request in texts:
            drafter.propose(request, 1)
        assert [drafter._own[request].num_tokens for request in texts] == [10 * step, 3 * step]


def test_responses_are_indexed_at_the_steps_to_come(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_CATCH_UP", 15)
    drafter = SuffixDrafter()
    for i in range(4):
        request = make_request([-2], f"ended {i}")
        request.token_ids += range(10 * i, 10 * i + 10)
        drafter.forget(request)
    proposals = []
    for step in range(3):
        ids = [drafter.propose(make_request([10 * i], f"{i} at {step}"), 1) for i in range(4)]
        proposals.append([bool(each) for each in ids])
        drafter.begin_step()
    assert proposals == [[False] * 4, [True, True, False, False], [True] * 4]


# ---------------------------------------------------------------------- earlier responses


@given(responses, texts, st.integers(1, 12))
def test_the_longer_match_of_own_tokens_and_responses_is_taken(responses, known, most):
    drafter = SuffixDrafter()
    for response in responses:
        respond(drafter, response)
    own_length, own_ends = longest_match(known, known)
    found = [(*longest_match(response, known), response) for response in responses]
    length = max([own_length, *(found_length for found_length, _, _ in found)])
    allowed = [continue_in_period(known, end, min(most, length)) for end in own_ends]
    if length > own_length:
        allowed = [
            response[end : end + min(most, length)]
            for found_length, ends, response in found
            if found_length == length
            for end in ends
        ]
    assert drafter.propose(make_request(known), most) in (allowed or [[]])


def test_a_draft_is_the_continuation_in_the_most_recent_response():
    drafter = SuffixDrafter()
    for last in (7, 8, 9):
        respond(drafter, [1, 2, 3, 4, 5, 6, last, last])
    assert drafter.propose(make_request([5, 6]), 9) == [9, 9]


def test_a_prompt_is_not_a_template():
    drafter = SuffixDrafter()
    request = make_request(list(range(20)), "ended")
    request.token_ids += range(30, 40)
    drafter.forget(request)
    drafter.begin_step()
    assert drafter.propose(make_request([3, 4, 5]), 4) == []
    assert drafter.propose(make_request([18, 19], "other"), 4) == []
    assert drafter.propose(make_request([33, 34, 35], "third"), 4) == [36, 37, 38]


def test_no_match_and_no_draft_crosses_from_one_response_into_the_next():
    drafter = SuffixDrafter()
    respond(drafter, [10, 11, 12, 13, 14, 15, 16, 17])
    respond(drafter, [20, 21, 22, 23, 24, 25, 26, 27])
    assert drafter.propose(make_request([13, 14, 15]), 9) == [16, 17]
    assert drafter.propose(make_request([15, 16, 17], "b"), 9) == []
    assert drafter.propose(make_request([17, 20], "c"), 9) == [21]


def test_a_match_at_a_responses_end_gives_way_to_a_shorter_one_that_goes_on():
    drafter = SuffixDrafter()
    respond(drafter, [1, 2, 3, 4, 5, 6, 7, 8])
    respond(drafter, [11, 12, 13, 14, 15, 9, 2, 3])
    assert drafter.propose(make_request([9, 2, 3]), 9) == [4, 5]


def test_a_short_response_is_not_kept():
    drafter = SuffixDrafter()
    respond(drafter, [1, 2, 3, 4, 5, 6, 7])
    assert drafter.propose(make_request([1, 2]), 4) == []


def test_a_request_follows_a_response_that_came_after_it_started():
    drafter = SuffixDrafter()
    request = make_request([50, 51])
    respond(drafter, list(range(60, 80)))
    assert drafter.propose(request, 4) == []
    respond(drafter, list(range(20)))
    drafts = []
    for token in range(5, 9):
        request.token_ids.append(token)
        drafts.append(drafter.propose(request, 8))
    assert drafts == [[6], [7, 8], [8, 9, 10], [9, 10, 11, 12]]


def test_a_match_does_not_grow_by_tokens_that_a_later_response_had_before_it():
    drafter = SuffixDrafter()
    respond(drafter, [1, 2, 3, 4, 10, 11, 12, 13])
    request = make_request([20, 4])  # 4 stands for 1, 2, 3, 4 until a response has it elsewhere
    assert drafter.propose(request, 9) == [10]
    respond(drafter, [30, 31, 32, 3, 4, 40, 41, 42, 43, 44])
    request.token_ids.append(40)
    assert drafter.propose(request, 9) == [41, 42]


def test_after_a_long_pause_only_the_last_tokens_are_matched():
    drafter = SuffixDrafter()
    template = list(range(300))
    respond(drafter, template)
    request = make_request([1000])
    drafter.propose(request, 1)
    request.token_ids += template[:200]
    assert drafter.propose(request, 100) == template[200 : 200 + suffix.MAX_CURSOR_LAG]


@given(responses, responses, texts)
def test_nothing_of_one_scope_shows_in_another(mine, foreign, known):
    alone, beside = SuffixDrafter(), SuffixDrafter()
    request = make_request(known[:1], scope=b"mine")
    other = make_request(known[::-1], "other", scope=b"foreign")
    for i, token in enumerate(known):
        for drafter in (alone, beside):
            for response in mine[i : i + 1]:
                respond(drafter, response, b"mine")
        for response in foreign[i : i + 1]:
            respond(beside, response, b"foreign")
        beside.propose(other, 8)
        assert alone.propose(request, 8) == beside.propose(request, 8)
        request.token_ids.append(token)


# ---------------------------------------------------------------------- memory


def test_nothing_is_kept_of_requests_that_ended_but_their_responses():
    drafter = SuffixDrafter()
    respond(drafter, list(range(20)))
    requests = [make_request([i, i + 1], f"live {i}") for i in range(10)]
    for request in requests:
        drafter.propose(request, 4)
    for request in [*requests, make_request([1], "never proposed", b"never seen")]:
        drafter.forget(request)
    assert not drafter._own
    assert list(drafter._scopes) == [SHARED]
    assert not any(generation._cursors for generation in drafter._scopes[SHARED])


def test_of_another_engine_no_response_is_known_and_live_requests_go_on():
    drafter = SuffixDrafter()
    respond(drafter, list(range(20)))
    drafter.begin_step()
    request = make_request([30, 31, 30])
    respond(drafter, list(range(40, 60)), b"not indexed yet")
    drafter.forget_ended()
    drafter.begin_step()
    assert drafter.propose(request, 1) == [31]
    request.token_ids += [5, 6]
    assert drafter.propose(request, 4) == []
    assert not drafter._scopes


def test_a_scope_forgets_its_oldest_responses(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_GENERATION_TOKENS", 43)
    drafter = SuffixDrafter()
    for i in range(20):
        respond(drafter, list(range(10 * i, 10 * i + 10)))
        kept = [len(generation._token_ids) for generation in drafter._scopes[SHARED]]
        assert sum(kept) <= 2 * 43
    proposals = [drafter.propose(make_request([10 * i], f"{i}"), 1) for i in range(20)]
    assert proposals == [[]] * 15 + [[10 * i + 1] for i in range(15, 20)]


def test_of_a_response_longer_than_a_generation_only_the_start_is_kept(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_GENERATION_TOKENS", 40)
    drafter = SuffixDrafter()
    respond(drafter, list(range(100)))
    assert drafter.propose(make_request([36, 37]), 9) == [38]
    assert drafter.propose(make_request([37, 38], "b"), 9) == []


@pytest.mark.parametrize("ended", [False, True], ids=["proposing", "ending"])
def test_the_scope_that_was_not_used_for_longest_goes(ended, monkeypatch):
    monkeypatch.setattr(suffix, "MAX_SCOPES", 2)
    drafter = SuffixDrafter()
    respond(drafter, list(range(10)), b"a")
    respond(drafter, list(range(10)), b"b")
    user = make_request([1], "user", b"a")
    if ended:
        drafter.forget(user)
    else:
        drafter.propose(user, 1)
    respond(drafter, list(range(10)), b"c")
    assert list(drafter._scopes) == [b"a", b"c"]
    assert drafter.propose(make_request([3, 4], scope=b"b"), 2) == []
    assert drafter.propose(make_request([3, 4], "live too", b"a"), 2) == [5, 6]


def test_many_requests_get_the_drafts_that_their_scope_alone_gives_them():
    """Some hundred requests of one template each come and go, in several scopes at once."""
    random = Random(2)
    drafter = SuffixDrafter()
    num_proposed = 0
    for i in range(300):
        scope = random.randrange(4)
        template = [1000 * scope + j for j in range(40)]
        request = make_request([5000 + i], f"{i}", bytes([scope]))
        for token in template:
            draft_ids = drafter.propose(request, 8)
            known = len(request.token_ids) - 1
            assert draft_ids == template[known : known + len(draft_ids)]
            num_proposed += len(draft_ids)
            request.token_ids.append(token)
        drafter.forget(request)
        drafter.begin_step()
    # Per request: 1 + 2 + ... + 7 while the match grows, then 8, and what is left at the end.
    assert num_proposed == (300 - 4) * (28 + 25 * 8 + 28)
