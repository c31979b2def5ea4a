"""`preprocessing` and `postprocessing`: text to tokens and back, around `tensorrt_llm`.

Owns the models for clients that tokenize separately. Must not know the scheduler: these models have
no state. So `postprocessing` of a stream breaks a character whose tokens are in two responses;
`ensemble` does not.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from charonia.checkpoint_files import read_json_object
from charonia.errors import CharoniaError, InvalidRequestError
from charonia.serving.conventions.schema import PromptLimits
from charonia.serving.conventions.trtllm.rows import Row, pack_words, pad, rows_of
from charonia.serving.conventions.trtllm.tables import MODELS
from charonia.serving.conventions.trtllm.words import bias_of, check_words, within
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.raw_request import Array, Outputs, RawRequest
from charonia.serving.requests.responders import TritonResponder, failing_with_errors
from charonia.serving.requests.tensors import read_request
from charonia.serving.requests.tokenizing import INLINE_CHARACTERS, Prompt, Tokenizing
from charonia.text.tokenizer import Tokenizer

_LIMITS = PromptLimits()


class TextModel(Protocol):
    """Answers a request by its contents alone."""

    def answer(self, raw: RawRequest) -> Outputs:
        """All outputs for it.

        Raises:
            CharoniaError: it is refused.
        """
        ...


class TextHost:
    """A text model behind Triton. Long requests are answered in a thread of its own.

    Args:
        queue_limit: limits of the waiting requests. log: takes one line, from any thread.
    """

    def __init__(
        self,
        pb_utils: Any,
        model: TextModel,
        queue_limit: QueueLimit,
        *,
        log: Callable[[str], None],
    ) -> None:
        self._pb_utils = pb_utils
        self._model = model
        self._log = log
        self._long = Tokenizing(1, queue_limit, log=log)

    def execute(self, requests: list[Any]) -> None:
        """Answer requests, now or later."""
        for request in requests:
            responder = TritonResponder(self._pb_utils, request.get_response_sender())
            with failing_with_errors(responder, self._log) as log_fields:
                raw = read_request(request)
                log_fields.update(raw.log_fields)
                if raw.num_bytes <= INLINE_CHARACTERS:
                    self._send(responder, raw, self._model.answer(raw))
                else:
                    self._answer_later(responder, raw)

    def finalize(self) -> None:
        """End the waiting requests, and stop."""
        self._long.close()

    def _answer_later(self, responder: TritonResponder, raw: RawRequest) -> None:
        def done(outcome: Outputs | CharoniaError) -> None:
            with failing_with_errors(responder, self._log, raw.log_fields):
                if isinstance(outcome, CharoniaError):
                    raise outcome
                self._send(responder, raw, outcome)

        encode = partial(self._model.answer, raw)
        self._long.submit(Prompt(encode, raw.num_bytes, None, done, log_fields=raw.log_fields))

    def _send(self, responder: TritonResponder, raw: RawRequest, outputs: Outputs) -> None:
        asked = {name: value for name, value in outputs.items() if name in raw.output_names}
        responder.send(asked, is_final=True)


class Preprocessing:
    """`preprocessing`.

    Args:
        model_dir: of the checkpoint; its end token is the default.
    """

    def __init__(self, tokenizer: Tokenizer, model_dir: Path) -> None:
        self._tensors = MODELS["preprocessing"]
        self._tokenizer = tokenizer
        self._end_id = _end_id(model_dir)

    def answer(self, raw: RawRequest) -> Outputs:
        """See `TextModel`."""
        rows = rows_of(raw, self._tensors)
        check_words(raw.tensors)
        prompts = [self._encode(row) for row in rows]
        end_ids = [row.one("END_ID", self._end_id) for row in rows]
        pad_ids = [row.one("PAD_ID", end_id) for row, end_id in zip(rows, end_ids, strict=True)]
        outputs = {
            "INPUT_ID": pad(prompts, np.int32, pad_ids[0]),
            "REQUEST_INPUT_LEN": _column([len(ids) for ids in prompts]),
            "BAD_WORDS_IDS": self._word_lists(rows, "BAD_WORDS_DICT", "bad_words"),
            "STOP_WORDS_IDS": self._word_lists(rows, "STOP_WORDS_DICT", "stop"),
            "EMBEDDING_BIAS": self._biases(rows),
            "DECODER_INPUT_ID": _column(pad_ids),
            "REQUEST_DECODER_INPUT_LEN": _column([1] * len(rows)),
            "OUT_END_ID": _column(end_ids),
            "OUT_PAD_ID": _column(pad_ids),
        }
        if "REQUEST_OUTPUT_LEN" in raw.tensors:
            outputs["REQUEST_OUTPUT_LEN"] = raw.tensors["REQUEST_OUTPUT_LEN"]
        return outputs

    def _encode(self, row: Row) -> list[int]:
        text = row.text("QUERY")
        _LIMITS.check_bytes("QUERY", len(text.encode()))
        if not text:
            raise InvalidRequestError("QUERY must not be empty")
        return self._tokenizer.encode(text, check_length=_LIMITS.check_ids)

    def _word_lists(self, rows: Sequence[Row], name: str, limit: str) -> Array:
        """[batch, 2, tokens of the longest]."""
        lists = [
            pack_words(
                [
                    self._tokenizer.encode(word, add_special_tokens=False)
                    for word in within(name, row.texts(name), limit)
                ]
            )
            for row in rows
        ]
        halves = [pad([list(words[half]) for words in lists], np.int32, -1) for half in (0, 1)]
        return np.stack(halves, axis=1)

    def _biases(self, rows: Sequence[Row]) -> Array:
        """[batch, vocabulary], or [batch, 0] where there is none."""
        names = "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS"
        biases = [bias_of(row, *names, self._tokenizer) for row in rows]
        num_ids = self._tokenizer.vocab_size if any(biases) else 0
        values = np.zeros((len(rows), num_ids), dtype=np.float32)
        for row, bias in zip(values, biases, strict=True):
            row[list(bias)] = list(bias.values())
        return values


class Postprocessing:
    """`postprocessing`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tensors = MODELS["postprocessing"]
        self._tokenizer = tokenizer

    def answer(self, raw: RawRequest) -> Outputs:
        """See `TextModel`."""
        texts = [self._decode(row) for row in rows_of(raw, self._tensors)]
        handed_on = {
            f"OUT_{name}": array
            for name, array in raw.tensors.items()
            if name not in ("TOKENS_BATCH", "SEQUENCE_LENGTH")
        }
        return {"OUTPUT": np.array([*chain(*texts)], dtype=np.object_), **handed_on}

    def _decode(self, row: Row) -> list[bytes]:
        """The text of each beam."""
        for name in ("TOKENS_BATCH", "SEQUENCE_LENGTH"):
            if name not in row.tensors:
                raise InvalidRequestError(f"{name} is not present in the request")
        beams, lengths = row.tensors["TOKENS_BATCH"], row.tensors["SEQUENCE_LENGTH"].tolist()
        if len(lengths) != len(beams) or not all(0 <= n <= beams.shape[1] for n in lengths):
            raise InvalidRequestError(
                f"SEQUENCE_LENGTH must have {len(beams)} numbers, one for each beam of "
                f"TOKENS_BATCH, each from 0 to {beams.shape[1]}, but is {lengths[:16]}"
            )
        counted = [beam[:length].tolist() for beam, length in zip(beams, lengths, strict=True)]
        for id_ in (id_ for ids in counted for id_ in ids):
            if id_ < 0:
                raise InvalidRequestError(f"TOKENS_BATCH must have token ids from 0, but has {id_}")
        return [self._tokenizer.decode(ids).encode() for ids in counted]


def _column(values: list[int]) -> Array:
    """[batch, 1]."""
    return np.array(values, dtype=np.int32)[:, None]


def _end_id(model_dir: Path) -> int:
    """The first end token of a checkpoint; -1 if it has none."""
    for name in ("generation_config.json", "config.json"):
        found = read_json_object(model_dir / name, is_optional=True).get("eos_token_id")
        if found is not None:
            return int(found[0] if isinstance(found, list) else found)
    return -1
