"""Translates requests of TensorRT-LLM's convention to the scheduler's.

Owns the meaning of the convention's inputs, see `tables`. Must not know connections or senders.

A batch of B requests with n sequences each becomes B·n requests to the scheduler, which answers
each separately. All sampling parameters are set, so the checkpoint's defaults do not count.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from charonia.errors import (
    CharoniaError,
    ExactTextError,
    InvalidRequestError,
    RequestCancelledError,
    error_of,
    shown,
)
from charonia.protocol import MAX_ENTRIES, UINT64_MAX
from charonia.serving.conventions.convention import Part
from charonia.serving.conventions.interface import FLAGS, SAMPLING_PARAMETERS
from charonia.serving.conventions.parameters import OF_REQUESTS, PARAMETER_NAMES
from charonia.serving.conventions.schema import PromptLimits
from charonia.serving.conventions.trtllm.answers import OUTPUTS, Answer, End
from charonia.serving.conventions.trtllm.retention import retention_of
from charonia.serving.conventions.trtllm.rows import Row, rows_of
from charonia.serving.conventions.trtllm.tables import MODELS
from charonia.serving.conventions.trtllm.words import bias_of, check_words, within
from charonia.serving.requests.raw_request import Array, Outputs, RawRequest, num_bytes_of
from charonia.text.tokenizer import Tokenizer

MAX_RETURN_SEQUENCES = 64
MAX_SEQUENCES = 256
"""Most sequences of a batch's requests: more would fill the scheduler's queue with one request."""
STREAM_NEEDS_DECOUPLED = "Streaming is only supported if model is deployed using decoupled mode."
BATCH_NEEDS_DECOUPLED = (
    "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
)
STOP_NEEDS_ID = "Trying to stop a request but request ID is not provided"
_NAME = re.compile(r"^\w+|\b\w+_\w+\b")
"""Names in the text of an error: its first word, and words with an underscore."""
_COUNTED = (*OF_REQUESTS, "timeout")
"""Parameters of a request that are used; clients of TensorRT-LLM may send others."""
_MAX_KEPT = 2**16
"""Characters of parameters that may be headers, which go with each sequence of a batch."""
_LIMITS = PromptLimits()
_NO_END = -1
_NO_IDS = np.array([], dtype=np.int32)
_TRUE = np.array([True])


class _Request:
    """A request for text.

    Args:
        called: the convention's names for names in the scheduler's errors.
        place: its index in the batch, and the size of the batch.
    """

    def __init__(self, answer: Answer, called: Mapping[str, str], place: tuple[int, int]) -> None:
        self._answer = answer
        self._called = called
        self._place = place

    def answer(self, outputs: Outputs) -> Outputs:
        return self._answer.make(outputs)

    def failure(self, error: CharoniaError) -> CharoniaError | None:
        """The error in the convention's names; None for a stopped request, which just ends."""
        if isinstance(error, RequestCancelledError):
            return None
        if not error.has_suffix:
            return error
        says, but, value = str(error).partition(", but ")
        says = _NAME.sub(lambda name: self._called.get(name[0], name[0]), says)
        return _in_batch(error_of(f"{says}{but}{value}", error.kind), self._place)


class _Stop:
    """A request that ends others."""

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

    def split(self, raw: RawRequest) -> Sequence[tuple[RawRequest, Part]]:
        """See `Convention`.

        Raises:
            CharoniaError: a value is out of range, or asks for what charonia does not do.
        """
        rows = rows_of(raw, self._tensors)
        check_words(raw.tensors)
        raw = replace(raw, parameters=_kept(raw.parameters))
        stops = [bool(row.one("stop", False)) for row in rows]
        if any(stops):
            if not all(stops):
                raise InvalidRequestError(
                    f"stop must be the same in all of a batch, but is {stops}"
                )
            return [(_stop(raw), _Stop())]
        if not self._is_decoupled:
            self._check_unary(rows)
        if (total := sum(map(self._num_sequences, rows))) > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"num_return_sequences of all requests in a batch must be at most {MAX_SEQUENCES} "
                f"together, but is {total}"
            )
        return [
            request
            for index, row in enumerate(rows)
            for request in self._row_requests(raw, row, (index, len(rows)))
        ]

    def _row_requests(
        self, raw: RawRequest, row: Row, place: tuple[int, int]
    ) -> list[tuple[RawRequest, Part]]:
        try:
            return list(self._requests(raw, row, place))
        except CharoniaError as error:
            raise _in_batch(error, place) from None

    @abstractmethod
    def _prompt(self, row: Row) -> dict[str, Array]:
        """The scheduler's inputs for it."""

    @abstractmethod
    def _sampling(self, row: Row) -> dict[str, Any]:
        """The sampling parameters that come from this model's own tensors."""

    def _num_sequences(self, row: Row) -> int:
        num: int = row.one("num_return_sequences", 1)
        if not 1 <= num <= MAX_RETURN_SEQUENCES:
            raise InvalidRequestError(
                f"num_return_sequences must be from 1 to {MAX_RETURN_SEQUENCES}, but is {num}"
            )
        return num

    def _check_unary(self, rows: list[Row]) -> None:
        if len(rows) > 1:
            raise ExactTextError(BATCH_NEEDS_DECOUPLED)
        if rows[0].one(self.stream_input, False):
            raise ExactTextError(STREAM_NEEDS_DECOUPLED)
        if (num := self._num_sequences(rows[0])) > 1:
            raise InvalidRequestError(
                f"num_return_sequences must be 1 where the model is not decoupled, but is {num}"
            )

    def _requests(
        self, raw: RawRequest, row: Row, place: tuple[int, int]
    ) -> Iterator[tuple[RawRequest, Part]]:
        """The requests of one row, one for each sequence. `place`: index and size of the batch."""
        is_streaming = bool(row.one(self.stream_input, False))
        has_prompt = not (is_streaming or row.one("exclude_input_in_output", False))
        outputs = {
            name: one
            for name, one in OUTPUTS.items()
            if name in raw.output_names and (one.flag is None or row.one(one.flag, False))
        }
        prompt, sampling = self._prompt(row), self._all_sampling(row)
        has_ids = has_prompt and not outputs.keys().isdisjoint(("output_ids", "sequence_length"))
        answer = Answer(outputs, {}, prompt["input_ids"] if has_ids else _NO_IDS, self._end(row))
        tensors = {
            **prompt,
            "stream": np.array([is_streaming]),
            **{flag: _TRUE for flag, name in FLAGS.items() if name in answer.sources},
        }
        if not is_streaming:
            tensors["exclude_input_in_output"] = np.array([not has_prompt])
            tensors["return_cancelled_output"] = _TRUE
        num_sequences = self._num_sequences(row)
        for sequence in range(num_sequences):
            seed = (row.one("random_seed", 0) + sequence) & UINT64_MAX
            own = tensors | {SAMPLING_PARAMETERS: _json(sampling | {"seed": seed})}
            request = replace(
                raw,
                tensors=own,
                output_names=answer.sources,
                num_bytes=sum(map(num_bytes_of, own.values())) + len(raw.request_id),
            )
            places = {"batch_index": place, "sequence_index": (sequence, num_sequences)}
            indexes = {
                name: index
                for name, (index, num) in places.items()
                if num > 1 and name in raw.output_names
            }
            own_answer = replace(answer, indexes=indexes)
            yield request, _Request(own_answer, self._tensors.called, place)

    def _end(self, row: Row) -> End | None:
        end_id = row.one("end_id", _NO_END)
        if end_id == _NO_END:
            return None
        is_shown = 0 <= end_id < self._tokenizer.vocab_size
        is_shown = is_shown and end_id not in self._tokenizer.special_ids
        return End(end_id, self._tokenizer.token_text(end_id) if is_shown else "")

    def _all_sampling(self, row: Row) -> dict[str, Any]:
        """All sampling parameters except the seed."""
        values: dict[str, Any] = {
            "repetition_penalty": row.one("repetition_penalty", 1.0),
            "presence_penalty": row.one("presence_penalty", 0.0),
            "frequency_penalty": row.one("frequency_penalty", 0.0),
            "min_tokens": row.one("min_length", 0),
            "min_p": 0.0,
            "stop": [],
            "stop_token_ids": [],
            "include_stop_str_in_output": True,
            **self._sampling(row),
        }
        if (end_id := row.one("end_id")) is not None:
            values["ignore_eos"] = True
            if end_id != _NO_END:
                values["stop_token_ids"].append(end_id)
        if row.one("return_log_probs", False):
            values["logprobs"] = 0
        return values

    def _stops(self, name: str, words: Sequence[tuple[str, list[int]]]) -> dict[str, Any]:
        """Sampling parameters for words that end a text.

        Special tokens and parts of characters are not visible in the text, so they are matched by
        id.

        Args:
            words: each as text, and its tokens.
        """
        stops: dict[str, Any] = {"stop": [], "stop_token_ids": []}
        for text, ids in words:
            if self._is_text(text, ids):
                stops["stop"].append(text)
            elif len(ids) == 1:
                stops["stop_token_ids"].append(ids[0])
            else:
                raise InvalidRequestError(
                    f"{name} must have special tokens, and those of no whole character, as words of"
                    f" their own, but one word is {shown(text)}"
                )
        return stops

    def _is_text(self, text: str, ids: list[int]) -> bool:
        """Return whether these tokens can be matched in an answer by their text."""
        is_special = not self._tokenizer.special_ids.isdisjoint(ids)
        return bool(text) and not is_special and "\ufffd" not in text


class TextFacade(Facade):
    """`ensemble` and `tensorrt_llm_bls`: text in, text out."""

    stream_input = "stream"

    def _prompt(self, row: Row) -> dict[str, Array]:
        _LIMITS.check_bytes("text_input", len(row.require("text_input")))
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
    """`tensorrt_llm`: tokens in, tokens out. Without `end_id` an answer ends by length only."""

    stream_input = "streaming"

    def _prompt(self, row: Row) -> dict[str, Array]:
        row.require("request_output_len")
        length, ids = row.require("input_lengths"), row.tensors.get("input_ids")
        if ids is None:
            raise InvalidRequestError("input_ids is not present in the request")
        if not ids.size:
            raise InvalidRequestError("input_ids must have at least one token, but has none")
        if not 1 <= length <= ids.size:
            raise InvalidRequestError(
                f"input_lengths must be from 1 to {ids.size}, the number of input_ids, but is "
                f"{length}"
            )
        _LIMITS.check_ids(length)
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
            "bad_words": self._bad_words(row),
            **retention_of(row, row.require("input_lengths")),
            "logit_bias": dict(zip(places.tolist(), bias[places].tolist(), strict=True)),
        }

    def _bad_words(self, row: Row) -> list[str]:
        words = self._words(row, "bad_words_list", "bad_words")
        for text, ids in words:
            if "\ufffd" in text:
                raise InvalidRequestError(
                    f"bad_words_list must have words of whole characters, but {ids} is "
                    f"{shown(text)}"
                )
        return [text for text, _ in words]

    def _words(self, row: Row, name: str, limit: str) -> list[tuple[str, list[int]]]:
        words = row.word_list(name)
        for id_ in (id_ for ids in words for id_ in ids):
            if not 0 <= id_ < self._tokenizer.vocab_size:
                raise InvalidRequestError(
                    f"{name} must have token ids from 0 to {self._tokenizer.vocab_size - 1}, "
                    f"but has {id_}"
                )
        texts = [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in words]
        return list(zip(within(name, texts, limit), words, strict=True))


def _choice(row: Row, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """Sampling parameters of the choice: greedy without `top_k` and `top_p`, as TensorRT-LLM."""
    is_greedy = top_k == 1 or not (top_k or top_p)
    temperature = row.one("temperature", 1.0)
    return {
        "temperature": min(temperature, 0.0) if is_greedy else temperature,
        "top_k": top_k or 0,
        "top_p": top_p or 1.0,
    }


def _in_batch(error: CharoniaError, place: tuple[int, int]) -> CharoniaError:
    """The same error, with the index of the request in its batch."""
    index, num = place
    return error if num == 1 else error_of(f"request {index} of the batch: {error}", error.kind)


def _kept(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are used, and texts, which may be headers; the scheduler knows which.

    Raises:
        InvalidRequestError: they are too long.
    """
    kept = {
        name: value
        for name, value in parameters.items()
        if name in _COUNTED or (isinstance(value, str) and name not in PARAMETER_NAMES)
    }
    if (size := sum(len(name) + len(str(value)) for name, value in kept.items())) > _MAX_KEPT:
        raise InvalidRequestError(
            f"of the request's parameters at most {_MAX_KEPT} characters are accepted, but {size}"
            " came"
        )
    return kept


def _stop(raw: RawRequest) -> RawRequest:
    if not raw.request_id:
        raise ExactTextError(STOP_NEEDS_ID)
    tensors = {"cancel": np.array([True]), SAMPLING_PARAMETERS: _json({})}
    return replace(raw, tensors=tensors, output_names=frozenset(), num_bytes=1)


def _json(values: dict[str, Any]) -> Array:
    return np.array([json.dumps(values).encode()], dtype=np.object_)
