"""The nearest earlier prompt: what a list of all vectors would say, and never of another scope."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.embedding import Encoder, PromptIndex
from charonia.embedding import nearest as nearest_module
from support.embedding import WORDS, make_bert

SCOPES = (b"a", b"b")


class Directions:
    """An encoder whose texts are angles."""

    num_dims = 2

    def encode(self, text: str) -> np.ndarray | None:
        if text == "too long":
            return None
        return np.array([math.cos(float(text)), math.sin(float(text))], dtype=np.float32)


angles = st.integers(0, 24).map(lambda place: str(round(place * math.pi / 24, 3)))
adds = st.tuples(st.just("add"), st.sampled_from(SCOPES), angles)
finds = st.tuples(st.just("find"), st.sampled_from(SCOPES), angles)
removals = st.tuples(st.just("remove"), st.sampled_from(SCOPES), angles)


@settings(deadline=None)
@given(st.lists(adds | finds | removals, max_size=40))
def test_it_finds_what_a_look_at_all_would(calls: list[tuple[str, bytes, str]]) -> None:
    index, encoder = PromptIndex(Directions()), Directions()
    known: dict[bytes, dict[bytes, np.ndarray]] = {scope: {} for scope in SCOPES}
    for what, scope, text in calls:
        vector, key = encoder.encode(text), scope + text.encode()
        if what == "add":
            index.add(scope, key, vector)
            known[scope][key] = vector
        elif what == "remove":
            index.remove(key)
            known[scope].pop(key, None)
        else:
            match = index.find(scope, text)
            best = max((float(one @ vector) for one in known[scope].values()), default=None)
            if best is None:
                assert match.key is None
            else:
                assert match.similarity == pytest.approx(best, abs=1e-5)
                assert float(known[scope][match.key] @ vector) == pytest.approx(best, abs=1e-5)
            np.testing.assert_array_equal(match.vector, vector)
        assert len(index) == sum(map(len, known.values()))


def test_a_text_that_cannot_be_compared_has_no_match() -> None:
    index = PromptIndex(Directions())
    assert index.find(b"a", "too long") is None


def test_a_vector_is_as_near_to_itself_as_can_be() -> None:
    """A threshold of 1 finds what has the same vector."""
    index = PromptIndex(Directions())
    for place in range(200):
        scope, text = str(place).encode(), str(place / 31)
        index.add(scope, scope, Directions().encode(text))
        assert index.find(scope, text).similarity == 1.0


def test_scopes_are_bounded_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_module, "MAX_SCOPES", 2)
    index, vector = PromptIndex(Directions()), Directions().encode("0")
    for scope in (b"1", b"2"):
        index.add(scope, scope, vector)
    index.find(b"1", "0")
    index.add(b"3", b"3", vector)
    assert [index.find(scope, "0").key for scope in (b"1", b"2", b"3")] == [b"1", None, b"3"]
    assert len(index) == 2
    index.remove(b"2")
    index.add(b"1", b"1", vector)
    assert len(index) == 2


def test_with_a_model_a_prompt_finds_itself_among_many(tmp_path: Path) -> None:
    index = PromptIndex(Encoder.from_dir(make_bert(tmp_path)))
    texts = [
        f"{one} {other} {third}" for one in WORDS[:6] for other in WORDS for third in WORDS[:3]
    ]
    for text in texts:
        match = index.find(b"a", text)
        assert match is not None
        index.add(b"a", text.encode(), match.vector)
    for text in texts:
        match = index.find(b"a", text)
        assert match.key == text.encode()
        assert match.similarity == pytest.approx(1.0, abs=1e-5)
        assert index.find(b"b", text).key is None
    assert index.bytes_per_prompt == 32 * 4 + 2048
