"""The `tokenizer` model: turns the prompt of `llm` into token ids. Stateless.

Owns the check of the prompt, the request's key, and its timeout while the prompt waits. Must not
know sequences.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from charonia.checkpoint_files import read_json_object
from charonia.config import EngineArgs
from charonia.core.request_log import ended_line
from charonia.errors import CharoniaError, PromptTooLongError
from charonia.serving.conventions.interface import INPUT_IDS, PROMPT_TEXT, REQUEST_KEY
from charonia.serving.conventions.schema import (
    PromptLimits,
    read_flag,
    read_prompt,
    read_time_limit,
)
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.raw_request import Array, Outputs, RawRequest
from charonia.serving.requests.request_key import Sealer
from charonia.serving.requests.responders import (
    LogFields,
    TritonResponder,
    failing_with_errors,
)
from charonia.serving.requests.tensors import read_request
from charonia.serving.requests.tokenizing import INLINE_CHARACTERS, Prompt, Tokenizing
from charonia.text.tokenizer import Tokenizer

T = TypeVar("T")


class TokenizerHost:
    """One tokenizer behind Triton.

    Args:
        model_file: the engine's model.json, which names the tokenizer.
        queue_limit: limits of the prompts that wait. log: takes one line, from any thread.

    Raises:
        ConfigError, CheckpointError: there is no usable tokenizer.
    """

    def __init__(
        self,
        pb_utils: Any,
        model_file: Path,
        queue_limit: QueueLimit,
        *,
        log: Callable[[str], None],
    ) -> None:
        self._pb_utils = pb_utils
        self._model_file = model_file
        self._log = log
        self._tokenizer = Tokenizer.from_dir(EngineArgs.from_file(model_file).tokenizer_dir)
        self._limits = self._read_limits()
        self._sealer = Sealer.from_dir(model_file.parent)
        self._tokenizing = Tokenizing(1, queue_limit, log=log)

    def execute(self, requests: list[Any]) -> None:
        """Answer each request with ids, the text that they came from, and a new key.

        Long prompts are tokenized in another thread, so that short ones do not wait for them.
        """
        for request in requests:
            responder = TritonResponder(self._pb_utils, request.get_response_sender())
            with failing_with_errors(responder, self._log) as log_fields:
                raw = read_request(request)
                log_fields.update(raw.log_fields)
                self._take(raw, responder)

    def finalize(self) -> None:
        """End the waiting requests, and stop."""
        self._tokenizing.close()

    def _take(self, raw: RawRequest, responder: TritonResponder) -> None:
        if read_flag(raw.tensors, "cancel"):
            responder.send({INPUT_IDS: [], PROMPT_TEXT: [], REQUEST_KEY: []}, is_final=True)
            return
        arrived_at = time.monotonic()
        text, ids = self._within_limits(partial(read_prompt, raw.tensors))
        if text is None:
            assert ids is not None
            responder.send(self._outputs(ids, "", arrived_at), is_final=True)
        elif len(text) <= INLINE_CHARACTERS:
            responder.send(self._outputs(self._encode(text), text, arrived_at), is_final=True)
        else:
            limit = read_time_limit(raw)
            self._tokenizing.submit(
                Prompt(
                    encode=partial(self._encode, text),
                    num_bytes=raw.num_bytes,
                    expires_at=None if limit is None else arrived_at + limit.seconds,
                    is_until_start=limit is None or limit.is_until_start,
                    log_fields=raw.log_fields,
                    done=partial(self._answer, text, responder, arrived_at, raw.log_fields),
                )
            )

    def _answer(
        self,
        text: str,
        responder: TritonResponder,
        arrived_at: float,
        log_fields: LogFields,
        ids: list[int] | CharoniaError,
    ) -> None:
        with failing_with_errors(responder, self._log, log_fields):
            if isinstance(ids, CharoniaError):
                self._log(ended_line(ids, log_fields))
                raise ids
            responder.send(self._outputs(ids, text, arrived_at), is_final=True)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, check_length=self._check_length)

    def _check_length(self, num_ids: int) -> None:
        self._within_limits(lambda limits: limits.check_ids(num_ids))

    def _within_limits(self, check: Callable[[PromptLimits], T]) -> T:
        """Run a check. If a prompt is too long, read the limits again and check once more."""
        try:
            return check(self._limits)
        except PromptTooLongError:
            self._limits = self._read_limits()  # another engine may have been loaded
            return check(self._limits)

    def _read_limits(self) -> PromptLimits:
        """Limits of prompts that hold whatever the scheduler decides."""
        args = EngineArgs.from_file(self._model_file)
        config = read_json_object(Path(args.model) / "config.json", is_optional=True)
        max_model_len = args.max_model_len or config.get("max_position_embeddings")
        if not isinstance(max_model_len, int):
            return PromptLimits()
        return PromptLimits.of(max_model_len - 1, self._tokenizer.max_bytes_per_token)

    def _outputs(self, ids: list[int] | Array, text: str, arrived_at: float) -> Outputs:
        array = np.asarray(ids, dtype=np.int32)
        return {
            INPUT_IDS: array,
            PROMPT_TEXT: [text] if text else [],
            REQUEST_KEY: [self._sealer.new_key(array, text, arrived_at)],
        }
