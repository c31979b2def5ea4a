"""Vectors of earlier prompts, and the nearest of them to another prompt.

Owns one index per scope: a prompt is found only in the scope that it was put into. Must not know
what a scope or a key stands for. For one thread at a time.

An index is usearch's HNSW (Malkov and Yashunin 2018) by cosine, in float32. The number of scopes is
bounded: the least recently used one is forgotten.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

from charonia.embedding.bert import Encoder, Vector

MAX_SCOPES = 256
"""Each takes some 50 KB, however few vectors it has."""
_GRAPH_BYTES = 2048
"""Bytes of a vector beside its numbers."""
_SIMILARITY_DIGITS = 6
"""Decimals of a cosine in float32 that are certain; rounded to them, a vector has 1 with itself."""


class Match(NamedTuple):
    """The nearest prompt.

    Attributes:
        vector: of the prompt. key: of the nearest one, None if there is none. similarity: their
            cosine.
    """

    vector: Vector
    key: bytes | None
    similarity: float


class _Scope:
    """The vectors of one scope."""

    def __init__(self, num_dims: int) -> None:
        from usearch.index import Index  # loaded only if it is used

        self.index: Any = Index(ndim=num_dims, metric="cos", dtype="f32")
        self.keys: dict[int, bytes] = {}  # by label


class PromptIndex:
    """Finds earlier prompts of similar meaning.

    Args:
        encoder: computes vectors of texts.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._scopes: OrderedDict[bytes, _Scope] = OrderedDict()  # most recently used last
        self._places: dict[bytes, tuple[bytes, int]] = {}  # by key: scope and label
        self._next_label = 0

    @property
    def bytes_per_prompt(self) -> int:
        """Bytes that one prompt takes."""
        return self._encoder.num_dims * 4 + _GRAPH_BYTES

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self._places)

    def find(self, scope: bytes, text: str) -> Match | None:
        """Find the nearest prompt of a scope; None if `Encoder.encode` gives no vector."""
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
        """Add a prompt. Does nothing if there is one with this key."""
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
        """Remove a prompt. Does nothing if there is none."""
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
