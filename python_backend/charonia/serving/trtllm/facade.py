"""Requests of TensorRT-LLM's convention to the scheduler's, and answers back.

Owns what the convention's tensors mean, see `tables`. Must not know connections or senders.

A batch of B requests with n sequences each is B·n requests to the scheduler, which answers each for
itself. Everything about sampling is said, so the checkpoint's own defaults do not count.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from charonia.errors import (
    CharoniaError,
    ExactTextError,
    InvalidRequestError,
    RequestCancelledError,
    error_of,
)
from charonia.protocol import MAX_CHARACTERS, MAX_ENTRIES, UINT64_MAX
from charonia.serving.convention import Part
from charonia.serving.interface import FLAGS
from charonia.serving.tensors import Array, Outputs, RawRequest
from charonia.serving.trtllm.rows import Row, rows_of
from charonia.serving.trtllm.tables import MODELS
from charonia.text.tokenizer import Tokenizer

MAX_RETURN_SEQUENCES = 64
STREAM_NEEDS_DECOUPLED = "Streaming is only supported if model is deployed using decoupled mode."
BATCH_NEEDS_DECOUPLED = (
    "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
)
STOP_NEEDS_ID = "Trying to stop a request but request ID is not provided"
_TRITONS_OWN = ("priority", "timeout")
"""Parameters of a request that count; TensorRT-LLM has none, and its clients send any."""
_MAX_BIAS_CHARACTERS = 2**16


@dataclass(frozen=True)
class _Answer:
    """What the answers of one part are to carry.

    Attributes:
        outputs: by name. indexes: outputs that are the same in every answer.
        prompt_ids: come in front of the tokens. called: the names of what errors speak of.
    """

    outputs: "Mapping[str, _Output]"
    indexes: dict[str, Array]
    prompt_ids: list[int]
    called: Mapping[str, str]


class _Request:
    """A request for text."""

    def __init__(self, request: RawRequest, answer: _Answer) -> None:
        self.request = request
        self._answer = answer

    def answer(self, outputs: Outputs) -> Outputs:
        if self._answer.prompt_ids:
            ids = [*self._answer.prompt_ids, *outputs["output_ids"]]
            outputs = {**outputs, "output_ids": ids}
        made = {name: one.make(outputs[one.source]) for name, one in self._answer.outputs.items()}
        return made | self._answer.indexes

    def failure(self, error: CharoniaError) -> CharoniaError | None:
        """The same in the convention's names; a request that is stopped just ends."""
        if isinstance(error, RequestCancelledError):
            return None
        name, space, rest = str(error).partition(" ")
        if name not in self._answer.called or not error.has_suffix:
            return error
        return error_of(f"{self._answer.called[name]}{space}{rest}", error.kind)


class _Stop:
    """A request that ends others."""

    def __init__(self, request: RawRequest) -> None:
        self.request = request

    def answer(self, outputs: Outputs) -> None:
        return None

    def failure(self, error: CharoniaError) -> CharoniaError:
        return error


class Facade(ABC):
    """A model of the convention.

    Args:
        model: its name in `tables.MODELS`. is_decoupled: whether it can stream.
    """

    stream_input: str

    def __init__(self, model: str, tokenizer: Tokenizer, *, is_decoupled: bool) -> None:
        self._tensors = MODELS[model]
        self._tokenizer = tokenizer
        self._is_decoupled = is_decoupled

    def split(self, raw: RawRequest) -> Sequence[Part]:
        """See `Convention`.

        Raises:
            CharoniaError: a value is out of range, or asks for what charonia does not do.
        """
        rows = rows_of(raw, self._tensors)
        kept = {name: raw.parameters[name] for name in _TRITONS_OWN if name in raw.parameters}
        raw = replace(raw, parameters=kept)
        if rows[0].one("stop", False):
            return [_stop(raw)]
        num_sequences = [self._num_sequences(row) for row in rows]
        if not self._is_decoupled:
            self._check_unary(rows, num_sequences)
        return [
            self._part(raw, row, (index, len(rows)), (sequence, num))
            for index, (row, num) in enumerate(zip(rows, num_sequences, strict=True))
            for sequence in range(num)
        ]

    @abstractmethod
    def _prompt(self, row: Row) -> dict[str, Array]:
        """The scheduler's inputs for it."""

    @abstractmethod
    def _sampling(self, row: Row) -> dict[str, Any]:
        """The sampling parameters that only this model's tensors say."""

    def _num_sequences(self, row: Row) -> int:
        num: int = row.one("num_return_sequences", 1)
        if not 1 <= num <= MAX_RETURN_SEQUENCES:
            raise InvalidRequestError(
                f"num_return_sequences must be from 1 to {MAX_RETURN_SEQUENCES}, but is {num}"
            )
        return num

    def _check_unary(self, rows: list[Row], num_sequences: list[int]) -> None:
        if len(rows) > 1:
            raise ExactTextError(BATCH_NEEDS_DECOUPLED)
        if rows[0].one(self.stream_input, False):
            raise ExactTextError(STREAM_NEEDS_DECOUPLED)
        if num_sequences[0] > 1:
            raise InvalidRequestError(
                f"num_return_sequences must be 1 where the model is not decoupled, but is "
                f"{num_sequences[0]}"
            )

    def _part(
        self, raw: RawRequest, row: Row, place: tuple[int, int], sequence: tuple[int, int]
    ) -> _Request:
        """One request for text: which of the batch, and which of its sequences, of how many."""
        is_streaming = bool(row.one(self.stream_input, False))
        has_prompt = not (is_streaming or row.one("exclude_input_in_output", False))
        outputs = {
            name: one
            for name, one in _OUTPUTS.items()
            if name in raw.output_names and (one.flag is None or row.one(one.flag, False))
        }
        sources = frozenset(one.source for one in outputs.values())
        prompt = self._prompt(row)
        tensors = {
            **prompt,
            "stream": np.array([is_streaming]),
            "sampling_parameters": _json(self._all_sampling(row, sequence[0])),
            **{flag: np.array([True]) for flag, output in FLAGS.items() if output in sources},
        }
        if not is_streaming:
            tensors["exclude_input_in_output"] = np.array([not has_prompt])
        indexes = {
            name: _int32([index])
            for name, (index, num) in (("batch_index", place), ("sequence_index", sequence))
            if num > 1 and name in raw.output_names
        }
        request = replace(
            raw,
            tensors=tensors,
            output_names=sources,
            num_bytes=sum(map(_size, tensors.values())) + len(raw.request_id),
        )
        has_ids = has_prompt and "output_ids" in sources
        prompt_ids = prompt["input_ids"].tolist() if has_ids else []
        return _Request(request, _Answer(outputs, indexes, prompt_ids, self._tensors.called))

    def _all_sampling(self, row: Row, sequence: int) -> dict[str, Any]:
        values: dict[str, Any] = {
            "repetition_penalty": row.one("repetition_penalty", 1.0),
            "presence_penalty": row.one("presence_penalty", 0.0),
            "frequency_penalty": row.one("frequency_penalty", 0.0),
            "min_tokens": row.one("min_length", 0),
            "min_p": 0.0,
            "seed": (row.one("random_seed", 0) + sequence) & UINT64_MAX,
            "stop": [],
            "stop_token_ids": [],
            "include_stop_str_in_output": True,
            **self._sampling(row),
        }
        if (end_id := row.one("end_id")) is not None:
            values["ignore_eos"] = True
            if end_id >= 0:
                values["stop_token_ids"].append(end_id)
        if row.one("return_log_probs", False):
            values["logprobs"] = 0
        return values

    def _stops(self, name: str, words: Sequence[tuple[str, list[int]]]) -> dict[str, Any]:
        """Sampling parameters for words that end a text.

        A special token does not show in the text, so it is found by its id.

        Args:
            words: each as text, and its tokens.
        """
        special = self._tokenizer.special_ids
        for text, ids in words:
            if len(ids) > 1 and not special.isdisjoint(ids):
                raise InvalidRequestError(
                    f"{name} must have special tokens alone, but one word is {text[:80]!r}"
                )
        return {
            "stop": [text for text, ids in words if special.isdisjoint(ids)],
            "stop_token_ids": [ids[0] for _, ids in words if not special.isdisjoint(ids)],
        }


class TextFacade(Facade):
    """`ensemble` and `tensorrt_llm_bls`: text in, text out."""

    stream_input = "stream"

    def _prompt(self, row: Row) -> dict[str, Array]:
        row.require("text_input")
        return {"text_input": row.tensors["text_input"]}

    def _sampling(self, row: Row) -> dict[str, Any]:
        return {
            "max_tokens": row.require("max_tokens"),
            **_choice(row, row.one("top_k"), row.one("top_p")),
            **self._stops("stop_words", self._words(row, "stop_words", "stop")),
            "bad_words": within("bad_words", row.texts("bad_words"), "bad_words"),
            "logit_bias": bias_of(
                row, "embedding_bias_words", "embedding_bias_weights", self._tokenizer
            ),
        }

    def _words(self, row: Row, name: str, limit: str) -> list[tuple[str, list[int]]]:
        texts = within(name, row.texts(name), limit)
        return [(text, self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]


class TokenFacade(Facade):
    """`tensorrt_llm`: tokens in, tokens out. Without `end_id` only its length ends an answer."""

    stream_input = "streaming"

    def _prompt(self, row: Row) -> dict[str, Array]:
        row.require("request_output_len")
        length, ids = row.require("input_lengths"), row.tensors.get("input_ids")
        if ids is None:
            raise InvalidRequestError("input_ids is not present in the request")
        if not 1 <= length <= ids.size:
            raise InvalidRequestError(
                f"input_lengths must be from 1 to {ids.size}, the number of input_ids, but is "
                f"{length}"
            )
        drafts = row.tensors.get("draft_input_ids")
        return {"input_ids": ids[:length]} | ({} if drafts is None else {"draft_input_ids": drafts})

    def _sampling(self, row: Row) -> dict[str, Any]:
        bias = row.tensors.get("embedding_bias", np.array([]))
        places = np.flatnonzero(bias)
        if places.size > MAX_ENTRIES["logit_bias"]:
            raise InvalidRequestError(
                f"embedding_bias must have at most {MAX_ENTRIES['logit_bias']} values other than 0,"
                f" but has {places.size}"
            )
        return {
            "max_tokens": row.require("request_output_len"),
            "ignore_eos": True,
            **_choice(row, row.one("runtime_top_k"), row.one("runtime_top_p")),
            **self._stops("stop_words_list", self._words(row, "stop_words_list", "stop")),
            "bad_words": [text for text, _ in self._words(row, "bad_words_list", "bad_words")],
            "logit_bias": dict(zip(places.tolist(), bias[places].tolist(), strict=True)),
        }

    def _words(self, row: Row, name: str, limit: str) -> list[tuple[str, list[int]]]:
        words = row.word_list(name)
        texts = [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in words]
        if "" in texts:
            ids = words[texts.index("")]
            raise InvalidRequestError(f"{name} must have words with text, but {ids} has none")
        return list(zip(within(name, texts, limit), words, strict=True))


def bias_of(row: Row, words_name: str, weights_name: str, tokenizer: Tokenizer) -> dict[int, float]:
    """What words and weights, one for each, add to the logits, by token id.

    Raises:
        InvalidRequestError: there are not as many of the one as of the other.
    """
    words = within(words_name, row.texts(words_name), "logit_bias")
    weights = row.tensors.get(weights_name, np.array([])).ravel().tolist()
    if len(words) != len(weights):
        raise InvalidRequestError(
            f"{weights_name} must be as many as {words_name}, but are {len(weights)} for "
            f"{len(words)}"
        )
    bias: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        for id_ in tokenizer.encode(word, add_special_tokens=False):
            bias[id_] = bias.get(id_, 0.0) + weight
    return bias


def within(name: str, texts: list[str], limit: str) -> list[str]:
    """The same texts, if they are few enough to be tokenized at once."""
    most, num = MAX_ENTRIES[limit], sum(map(len, texts))
    most_characters = MAX_CHARACTERS.get(limit, _MAX_BIAS_CHARACTERS)
    if len(texts) > most or num > most_characters:
        raise InvalidRequestError(
            f"{name} must have at most {most} entries and {most_characters} characters, but has "
            f"{len(texts)} and {num}"
        )
    return texts


def _choice(row: Row, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """How a token is chosen: without a limit the likeliest is taken, as TensorRT-LLM does."""
    is_greedy = top_k == 1 or not (top_k or top_p)
    temperature = row.one("temperature", 1.0)
    return {
        "temperature": min(temperature, 0.0) if is_greedy else temperature,
        "top_k": top_k or 0,
        "top_p": top_p or 1.0,
    }


def _stop(raw: RawRequest) -> _Stop:
    if not raw.request_id:
        raise ExactTextError(STOP_NEEDS_ID)
    tensors = {"cancel": np.array([True])}
    return _Stop(replace(raw, tensors=tensors, output_names=frozenset(), num_bytes=1))


def _json(values: dict[str, Any]) -> Array:
    return np.array([json.dumps(values).encode()], dtype=np.object_)


def _size(array: Array) -> int:
    return sum(map(len, array.flat)) if array.dtype == np.object_ else array.nbytes


def _int32(values: list[Any]) -> Array:
    """With the batch dimension in front, as the next ones."""
    return np.array([values], dtype=np.int32)


def _float32(values: list[Any]) -> Array:
    return np.array([values], dtype=np.float32)


def _texts(values: list[str]) -> Array:
    """Without the batch dimension, as TensorRT-LLM's postprocessing gives texts."""
    return np.array([text.encode() for text in values], dtype=np.object_)


def _log_probs(values: list[str]) -> Array:
    positions = json.loads(values[0]) or []
    found = [next(iter(position.values()))["logprob"] for position in positions]
    return _float32([[-math.inf if value is None else value for value in found]])


@dataclass(frozen=True)
class _Output:
    """An output of the convention.

    Attributes:
        source: of the scheduler's outputs. make: what it is of that.
        flag: the input that asks for it, where there is one.
    """

    source: str
    make: Callable[[list[Any]], Array]
    flag: str | None = None


_OUTPUTS: Mapping[str, _Output] = {
    "text_output": _Output("text_output", _texts),
    "output_ids": _Output("output_ids", lambda ids: _int32([ids])),
    "sequence_length": _Output("output_ids", lambda ids: _int32([len(ids)])),
    "cum_log_probs": _Output("cumulative_logprob", _float32, "return_log_probs"),
    "output_log_probs": _Output("logprobs", _log_probs, "return_log_probs"),
    "num_input_tokens": _Output("num_input_tokens", _int32, "return_num_input_tokens"),
    "num_output_tokens": _Output("num_output_tokens", _int32, "return_num_output_tokens"),
}
