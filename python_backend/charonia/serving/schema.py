"""What a request of the vLLM convention asks for, and what a chunk looks like to its client.

Owns the meaning of the public tensors (model_repository/README.md). Must not know senders, threads
or the engine.

Beside the public inputs there are `probe`, see `probing`, and two internal ones, for callers that
are models themselves::

    request_key   STRING [1]   the caller's own, unguessable name of the request: it can cancel
                               by it, and every response carries it as the output `request_key`
    prompt_text   STRING [-1]  with `input_ids`: the text that they came from, for the echo
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.engine.outputs import Chunk, name_logprobs
from charonia.errors import ExactTextError, InvalidRequestError, shown
from charonia.protocol import SamplingParams, TokenLogprobs
from charonia.serving.parameters import parse_sampling_params, parse_timeout
from charonia.serving.tensors import (
    INPUT_IDS,
    PROMPT_TEXT,
    REQUEST_KEY,
    Array,
    RawRequest,
)
from charonia.text.tokenizer import Tokenizer

ECHO_IN_STREAM = (
    "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
)
RETURN_FLAGS = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_token_ids": "output_ids",
    "return_timing": "timing",
}
"""Input that asks for an output, and that output."""
MAX_PROMPT_BYTES = 2**24
MAX_PROMPT_IDS = 2**22
MAX_SAMPLING_BYTES = 2**20
MAX_KEY_BYTES = 64
"""Far beyond what anybody needs; so that one request cannot occupy the process for minutes."""


@dataclass(frozen=True)
class OutputOptions:
    """What the responses of one request carry.

    Attributes:
        is_streaming: one response per new text, else one in all.
        has_echo: the prompt is prepended (never when streaming).
        names: outputs to give, beside `text_output`.
        request_key: given back on every response when the caller chose it.
    """

    is_streaming: bool
    has_echo: bool
    names: frozenset[str]
    request_key: str | None = None


@dataclass(frozen=True)
class GenerateCall:
    """A request for text. Exactly one of `text` and `prompt_ids` is set."""

    key: str
    request_id: str
    text: str | None
    prompt_ids: list[int] | None
    prompt_text: str | None
    params: SamplingParams
    timeout_s: float | None
    options: OutputOptions

    @property
    def wants_cumulative_logprob(self) -> bool:
        """Whether log-probabilities must be counted."""
        return "cumulative_logprob" in self.options.names


@dataclass(frozen=True)
class CancelCall:
    """Cancels one request by key, or all of this id and tenant."""

    key: str | None
    request_id: str
    tenant: str


@dataclass(frozen=True)
class ProbeCall:
    """Asks how the scheduler and its engine are, see `probing`.

    Attributes:
        wants_text: whether the answer is to be sent, and not only an empty response.
    """

    wants_text: bool


Call = GenerateCall | CancelCall | ProbeCall


def parse(raw: RawRequest, relayed_key: str | None = None) -> Call:
    """Say what a request asks for.

    Args:
        relayed_key: names a request that `relay` brought; only its caller gets to see it.

    Raises:
        InvalidRequestError: it is malformed; the text names the tensor or parameter.
        NotSupportedError: it asks for something that charonia does not do.
    """
    tensors = raw.tensors
    if read_flag(tensors, "probe"):
        return ProbeCall(wants_text="text_output" in raw.output_names)
    params = parse_sampling_params(_sampling_values(raw))
    key = _read_internal(tensors, REQUEST_KEY, MAX_KEY_BYTES)
    if read_flag(tensors, "cancel"):
        if key is None and not raw.request_id:
            raise InvalidRequestError("cancel needs the id of the request that it cancels")
        return CancelCall(key, raw.request_id, params.tenant)
    text, prompt_ids = read_prompt(tensors)
    prompt_text = text or _read_internal(tensors, PROMPT_TEXT, MAX_PROMPT_BYTES)
    options = _read_options(raw, params, key)
    if relayed_key is not None and options.is_streaming:
        raise InvalidRequestError("a relayed request cannot stream")
    return GenerateCall(
        key=relayed_key or key or secrets.token_hex(16),
        request_id=raw.request_id,
        text=text,
        prompt_ids=prompt_ids,
        prompt_text=prompt_text,
        params=params,
        timeout_s=_timeout_s(raw),
        options=options,
    )


def read_prompt(tensors: Mapping[str, Array]) -> tuple[str | None, list[int] | None]:
    """The prompt: a text or token ids, one of the two.

    Raises:
        InvalidRequestError: both, none, an empty one, or one far beyond any model's length.
    """
    text = read_text(tensors, "text_input", MAX_PROMPT_BYTES)
    ids = tensors.get(INPUT_IDS)
    if (text is None) == (ids is None):
        problem = "there is none" if text is None else "both are given"
        raise InvalidRequestError(f"text_input or input_ids must be given, but {problem}")
    if ids is None:
        if not text:
            raise InvalidRequestError("text_input must not be empty")
        return text, None
    if ids.ndim != 1 or ids.dtype != np.int32 or not ids.size:
        raise InvalidRequestError(
            f"input_ids must be a list of at least one INT32, but has shape {list(ids.shape)} "
            f"and type {ids.dtype}"
        )
    if ids.size > MAX_PROMPT_IDS:
        raise InvalidRequestError(
            f"input_ids must have at most {MAX_PROMPT_IDS} ids, but has {ids.size}"
        )
    return None, ids.tolist()


def read_text(tensors: Mapping[str, Array], name: str, max_bytes: int | None = None) -> str | None:
    """A STRING [1] input as text; None where it did not come.

    Raises:
        InvalidRequestError: another shape or type, too long, or not UTF-8.
    """
    array = tensors.get(name)
    if array is None:
        return None
    if array.size != 1 or array.dtype != np.object_:
        raise InvalidRequestError(_one_element(name, "string", array))
    value = array.item()
    if max_bytes is not None and len(value) > max_bytes:
        raise InvalidRequestError(
            f"{name} must have at most {max_bytes} bytes, but has {len(value)}"
        )
    if isinstance(value, str):
        return value
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None


def read_flag(tensors: Mapping[str, Array], name: str) -> bool | None:
    """A BOOL [1] input; None where it did not come.

    Raises:
        InvalidRequestError: another shape or type.
    """
    array = tensors.get(name)
    if array is None:
        return None
    if array.size != 1 or array.dtype != np.bool_:
        raise InvalidRequestError(_one_element(name, "boolean", array))
    return bool(array.item())


def chunk_outputs(
    chunk: Chunk, options: OutputOptions, prompt_text: str, tokenizer: Tokenizer
) -> dict[str, list[Any]]:
    """The outputs of one response.

    Args:
        chunk: without an error. prompt_text: for the echo.
    """
    candidates: dict[str, Any] = {
        "finish_reason": chunk.finish_reason or "None",
        "cumulative_logprob": chunk.cumulative_logprob,
        "num_input_tokens": chunk.num_prompt_tokens,
        "num_output_tokens": len(chunk.token_ids),
    }
    if "logprobs" in options.names:
        candidates["logprobs"] = _logprobs_json(chunk.logprobs, tokenizer)
    if "prompt_logprobs" in options.names and chunk.prompt_logprobs is not None:
        candidates["prompt_logprobs"] = _logprobs_json(chunk.prompt_logprobs, tokenizer)
    if chunk.timing is not None:
        candidates["timing"] = json.dumps(chunk.timing)
    outputs: dict[str, list[Any]] = {
        "text_output": [prompt_text + chunk.text if options.has_echo else chunk.text]
    }
    outputs |= {
        name: [value]
        for name, value in candidates.items()
        if name in options.names and value is not None
    }
    if "output_ids" in options.names:
        outputs["output_ids"] = list(chunk.token_ids)
    if options.request_key is not None:
        outputs[REQUEST_KEY] = [options.request_key]
    return outputs


def _one_element(name: str, kind: str, array: Array) -> str:
    return f"{name} must be one {kind}, but has shape {list(array.shape)} and type {array.dtype}"


def _sampling_values(raw: RawRequest) -> Mapping[str, Any]:
    """The tensor's JSON object where there is one, else the request's own parameters.

    `priority` is Triton's own parameter too, so it counts in either place.
    """
    text = read_text(raw.tensors, "sampling_parameters", MAX_SAMPLING_BYTES)
    if text is None:
        return raw.parameters
    try:
        values = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"sampling_parameters is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequestError(
            f"sampling_parameters must be a JSON object, but is {shown(text)}"
        )
    if "priority" in raw.parameters:
        values = {"priority": raw.parameters["priority"]} | values
    return values


def _timeout_s(raw: RawRequest) -> float | None:
    limits_us = [raw.timeout_us, parse_timeout(raw.parameters.get("timeout", 0))]
    return min((limit / 1e6 for limit in limits_us if limit), default=None)


def _read_internal(tensors: Mapping[str, Array], name: str, max_bytes: int) -> str | None:
    """A string of another model; in an ensemble an empty tensor says that there is none."""
    array = tensors.get(name)
    return None if array is None or not array.size else read_text(tensors, name, max_bytes) or None


def _read_options(raw: RawRequest, params: SamplingParams, key: str | None) -> OutputOptions:
    is_streaming = bool(read_flag(raw.tensors, "stream"))
    excludes = read_flag(raw.tensors, "exclude_input_in_output")
    if is_streaming and excludes is False:
        raise ExactTextError(ECHO_IN_STREAM)
    wanted = {out for flag, out in RETURN_FLAGS.items() if read_flag(raw.tensors, flag)}
    if params.prompt_logprobs is not None:
        wanted.add("prompt_logprobs")
    return OutputOptions(
        is_streaming=is_streaming,
        has_echo=not (is_streaming or excludes),
        names=frozenset(wanted) & raw.output_names,
        request_key=key,
    )


def _logprobs_json(
    entries: tuple[TokenLogprobs, ...] | list[TokenLogprobs | None] | None, tokenizer: Tokenizer
) -> str:
    """A list with one object per token, `null` for the first of a prompt; `null` for none."""
    if entries is None:
        return "null"
    return json.dumps([entry and _entry_values(entry, tokenizer) for entry in entries])


def _entry_values(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, dict[str, Any]]:
    return {
        token_id: {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for token_id, one in name_logprobs(entry, tokenizer).items()
    }
