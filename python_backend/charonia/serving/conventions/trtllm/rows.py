"""Splits a request of TensorRT-LLM's convention into the requests of its batch.

Owns the batch dimension, the refusal of inputs by name, and word lists. Must not know sampling.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from charonia.errors import InvalidRequestError, NotSupportedError, shown
from charonia.serving.conventions.schema import decoded
from charonia.serving.conventions.trtllm.tables import FacadeTensors, Refused
from charonia.serving.requests.raw_request import NUMPY_TYPES, Array, RawRequest

PADDING = -1
"""Follows the last end in a word list."""


class Row:
    """One request of a batch.

    Args:
        tensors: the inputs that are present, without the batch dimension.
    """

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self.tensors = tensors

    def one(self, name: str, default: Any = None) -> Any:
        """The value of an input with one element."""
        array = self.tensors.get(name)
        if array is None:
            return default
        if array.size != 1:
            raise InvalidRequestError(f"{name} must be one value, but has {array.size}")
        return array.item()

    def require(self, name: str) -> Any:
        """The same for a required input."""
        value = self.one(name)
        if value is None:
            raise InvalidRequestError(f"{name} is not present in the request")
        return value

    def text(self, name: str) -> str:
        """The same as text."""
        return decoded(name, self.require(name))

    def texts(self, name: str) -> list[str]:
        """The non-empty texts of an input."""
        return [text for text in self.all_texts(name) if text]

    def all_texts(self, name: str) -> list[str]:
        """The texts of an input."""
        array = self.tensors.get(name, np.array([], dtype=np.object_))
        return [decoded(name, value) for value in array.ravel()]

    def word_list(self, name: str) -> list[list[int]]:
        """The words of an input in the format of `pack_words`.

        Raises:
            InvalidRequestError: it has another format.
        """
        array = self.tensors.get(name)
        if array is None or not array.size:
            return []
        if array.ndim != 2 or len(array) != 2:
            raise InvalidRequestError(
                f"{name} must have shape [2, n], but has {list(array.shape)} without the batch's"
            )
        ids, ends = array.tolist()
        words, start = [], 0
        for end in ends:
            if end == PADDING:
                break
            if not start < end <= len(ids):
                raise InvalidRequestError(
                    f"{name} must say in its second row where each word ends, from {start + 1} to"
                    f" {len(ids)} here, but says {end}"
                )
            words.append(ids[start:end])
            start = end
        return words


def pack_words(words: Sequence[Sequence[int]]) -> Array:
    """Words in TensorRT-LLM's format.

    Returns:
        [2, n] int32 for n tokens in all: the tokens; the end of each word, then `PADDING`.
    """
    ids = [id_ for word in words for id_ in word]
    packed = np.full((2, len(ids)), PADDING, dtype=np.int32)
    packed[0] = ids
    packed[1, : len(words)] = np.cumsum([len(word) for word in words], dtype=np.int32)
    return packed


def pad(rows: Sequence[Sequence[Any]], dtype: type, padding: Any) -> Array:
    """Rows of any lengths as [rows, longest]."""
    padded: Array = np.full((len(rows), max(map(len, rows))), padding, dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def rows_of(raw: RawRequest, tensors: FacadeTensors) -> list[Row]:
    """The requests of a batch, at least one.

    Raises:
        InvalidRequestError: a tensor has another type or number of dimensions than the model's, or
            not all have the same batch.
        NotSupportedError: they ask for a feature that charonia does not have.
    """
    known = {one.name: one for one in tensors.inputs}
    sizes = {}
    for name, array in raw.tensors.items():
        one = known[name]
        if array.ndim != 1 + len(one.dims) or array.dtype != NUMPY_TYPES[one.datatype]:
            raise InvalidRequestError(
                f"{name} must be {one.datatype} of shape [batch, "
                f"{', '.join('n' if size < 0 else str(size) for size in one.dims)}], but has shape "
                f"{list(array.shape)} and type {array.dtype}"
            )
        sizes[name] = len(array)
    if len(set(sizes.values())) != 1 or not min(sizes.values()):
        said = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "none"
        raise InvalidRequestError(f"all inputs must have the same batch, but there are {said}")
    _refuse(raw.tensors, tensors.refused)
    num_rows = next(iter(sizes.values()))
    return [
        Row({name: array[index] for name, array in raw.tensors.items()})
        for index in range(num_rows)
    ]


def _refuse(tensors: Mapping[str, Array], refused: Iterable[Refused]) -> None:
    for one in refused:
        for item in tensors.get(one.name, np.array([])).flat:  # it may have millions
            value = item.item() if isinstance(item, np.generic) else item
            if value not in one.neutral:
                accepted = " or ".join(map(shown, one.neutral))
                raise NotSupportedError(
                    f"{one.name} = {shown(value)} is not supported; leave it out"
                    + (f" or use {accepted}" if accepted else "")
                )
