"""Vectors of earlier prompts, and the nearest of them to another one.

Owns an index for each scope: what is found in one was put into the same. Must not know what a scope
or a key stands for. For one thread at a time.

An index is usearch's HNSW (Malkov and Yashunin 2018) by cosine, in float32. Scopes are bounded: the
one that was used least recently is forgotten.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

from charonia.embedding.bert import Encoder, Vector

MAX_SCOPES = 256
"""Each takes some 50 KB, however few vectors it has."""
_GRAPH_BYTES = 2048
"""Of a vector, beside its numbers."""
_SIMILARITY_DIGITS = 6
"""Behind the point, that are certain of a cosine in float32: so that of a vector to itself is 1."""


class Match(NamedTuple):
    """What is nearest to a prompt.

    Attributes:
        vector: of the prompt. key: of the nearest one, None where there is none. similarity: their
            cosine.
    """

    vector: Vector
    key: bytes | None
    similarity: float


class _Scope:
    """The vectors of one scope."""

    def __init__(self, num_dims: int) -> None:
        from usearch.index import Index  # not to be loaded where nobody asks for it

        self.index: Any = Index(ndim=num_dims, metric="cos", dtype="f32")
        self.keys: dict[int, bytes] = {}  # by label


class PromptIndex:
    """Finds earlier prompts that mean much the same.

    Args:
        encoder: makes vectors of texts.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._scopes: OrderedDict[bytes, _Scope] = OrderedDict()  # the last used one is last
        self._places: dict[bytes, tuple[bytes, int]] = {}  # by key: scope and label
        self._next_label = 0

    @property
    def bytes_per_prompt(self) -> int:
        """That one takes."""
        return self._encoder.num_dims * 4 + _GRAPH_BYTES

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self._places)

    def find(self, scope: bytes, text: str) -> Match | None:
        """The nearest prompt of a scope; None where `Encoder.encode` has no vector of a text."""
        vector = self._encoder.encode(text)
        if vector is None:
            return None
        known = self._scopes.get(scope)
        if known is None or not known.keys:
            return Match(vector, None, 0.0)
        self._scopes.move_to_end(scope)
        found = known.index.search(vector, 1)
        if not len(found):
            return Match(vector, None, 0.0)
        similarity = round(1.0 - float(found.distances[0]), _SIMILARITY_DIGITS)
        return Match(vector, known.keys[int(found.keys[0])], similarity)

    def add(self, scope: bytes, key: bytes, vector: Vector) -> None:
        """Have a prompt found from now on; nothing happens where there is one with this key."""
        if key in self._places:
            return
        if scope not in self._scopes:
            self._scopes[scope] = _Scope(self._encoder.num_dims)
            if len(self._scopes) > MAX_SCOPES:
                _, oldest = self._scopes.popitem(last=False)
                for gone in oldest.keys.values():
                    del self._places[gone]
        self._scopes.move_to_end(scope)
        known, label = self._scopes[scope], self._next_label
        self._next_label += 1
        known.index.add(label, vector)
        known.keys[label] = key
        self._places[key] = scope, label

    def remove(self, key: bytes) -> None:
        """Find a prompt no more; nothing happens where there is none."""
        place = self._places.pop(key, None)
        if place is None:
            return
        scope, label = place
        known = self._scopes[scope]
        del known.keys[label]
        if known.keys:
            known.index.remove(label)
        else:
            del self._scopes[scope]
