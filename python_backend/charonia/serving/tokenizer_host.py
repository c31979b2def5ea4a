"""The `tokenizer` model's side: the prompt of `llm` to token ids. Stateless.

Owns checking the prompt and naming the request by a key. Must not know sequences.
"""

import locale
import secrets
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from charonia.config import EngineArgs
from charonia.errors import CharoniaError
from charonia.serving.schema import read_flag, read_prompt
from charonia.serving.tensors import (
    INPUT_IDS,
    INTERNAL_ERROR,
    PROMPT_TEXT,
    REQUEST_KEY,
    error_response,
    read_request,
    response,
)
from charonia.text.tokenizer import Tokenizer


class TokenizerHost:
    """One tokenizer behind Triton.

    Args:
        model_file: the engine's model.json, which names the tokenizer. log: takes one line.

    Raises:
        ConfigError, CheckpointError: there is no usable tokenizer.
    """

    def __init__(self, pb_utils: Any, model_file: Path, *, log: Callable[[str], None]) -> None:
        # The stub's interpreter decodes files as ASCII otherwise, also inside libraries.
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        self._pb_utils = pb_utils
        self._log = log
        self._tokenizer = Tokenizer.from_dir(EngineArgs.from_file(model_file).tokenizer_dir)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request with ids, the text that they came from, and a new key."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return response(self._pb_utils, self._outputs(read_request(request).tensors))
        except CharoniaError as error:
            return error_response(self._pb_utils, error)
        except Exception:
            self._log(f"a prompt could not be tokenized: {traceback.format_exc()}")
            return error_response(self._pb_utils, CharoniaError(INTERNAL_ERROR))

    def _outputs(self, tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
        if read_flag(tensors, "cancel"):
            return {INPUT_IDS: [], PROMPT_TEXT: [], REQUEST_KEY: []}
        text, ids = read_prompt(tensors)
        if text is not None:
            ids = self._tokenizer.encode(text)
        return {
            INPUT_IDS: ids or [],
            PROMPT_TEXT: [] if text is None else [text],
            REQUEST_KEY: [secrets.token_hex(16)],
        }
