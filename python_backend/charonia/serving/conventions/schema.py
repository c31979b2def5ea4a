"""Parses requests of the vLLM convention.

Owns the meaning of the public tensors (model_repository/README.md). Must not know senders, threads
or the engine.

`interface` lists the tensors. Beside the public inputs there are `probe`, see `probing`, and two
internal ones, for callers that are models themselves::

    request_key   STRING [-1]  the sealed name that `tokenizer` gave the request. Every response
                               carries the name, its own number and the tenant as the output
                               `request_key`, if that is asked for
    prompt_text   STRING [-1]  with `input_ids`: the text of the prompt, for the echo

Both are accepted from `tokenizer` only, see `request_key`.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from charonia.errors import ExactTextError, InvalidRequestError, PromptTooLongError, shown
from charonia.events import request_fields
from charonia.protocol import MAX_SAMPLES, SamplingParams
from charonia.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from charonia.serving.conventions.interface import (
    CANCEL_SAMPLES,
    DRAFT_IDS,
    FLAGS,
    INPUT_IDS,
    PROMPT_TEXT,
    REQUEST_KEY,
    SAMPLING_PARAMETERS,
)
from charonia.serving.conventions.parameters import (
    OF_REQUESTS,
    parse_sampling_params,
    parse_timeout,
    tenant_of_header,
    without_headers,
)
from charonia.serving.requests.raw_request import Array, RawRequest
from charonia.serving.requests.request_key import Sealer, arrival_of
from charonia.tracing.traceparent import trace_id_of

ECHO_IN_STREAM = (
    "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
)
MAX_SAMPLING_BYTES = 2**20
_MAX_KEY_BYTES = 128


@dataclass(frozen=True)
class PromptLimits:
    """Limits of a prompt's length. Longer ones are refused before they are decoded.

    The defaults are far beyond any real use; they bound the memory of one request.

    Attributes:
        is_by_vocabulary: whether `max_bytes` follows from `max_ids` and the vocabulary.
    """

    max_ids: int = 2**22
    max_bytes: int = 2**24
    is_by_vocabulary: bool = False

    @classmethod
    def of(cls, max_ids: int, max_bytes_per_token: int | None) -> "PromptLimits":
        """Limits for prompts of at most `max_ids` tokens.

        Args:
            max_bytes_per_token: of the tokenizer; None if a token may have any number of bytes.
        """
        most_ids = min(max_ids, cls.max_ids)
        if max_bytes_per_token is None or max_ids * max_bytes_per_token > cls.max_bytes:
            return cls(most_ids)
        return cls(most_ids, max_ids * max_bytes_per_token, is_by_vocabulary=True)

    def check_bytes(self, name: str, num_bytes: int) -> None:
        """Raises PromptTooLongError: more than `max_bytes`."""
        if num_bytes > self.max_bytes:
            why = f"; a prompt of {self.max_ids} tokens, the longest, has no more"
            raise PromptTooLongError(
                f"{name} must have at most {self.max_bytes} bytes, but has {num_bytes}"
                f"{why if self.is_by_vocabulary else ''}"
            )

    def check_ids(self, num_ids: int) -> None:
        """Raises PromptTooLongError: more than `max_ids`."""
        if num_ids > self.max_ids:
            known = self.max_ids < PromptLimits.max_ids
            length = self.max_ids + 1
            reason = f" (max_model_len {length} less one to generate)" if known else ""
            raise PromptTooLongError(
                f"the prompt has {num_ids} tokens; at most {self.max_ids} are accepted{reason}"
            )


@dataclass(frozen=True)
class OutputOptions:
    """Options of the responses to one request.

    Attributes:
        is_streaming: one response per new text; else one response in all.
        has_echo: whether the prompt is prepended (never in a stream).
        names: the outputs of the responses.
        has_key: whether each response carries the request's name, for reports.
        keeps_cancelled: whether a cancelled answer that is not a stream returns its output so far.
    """

    is_streaming: bool
    has_echo: bool
    names: frozenset[str]
    has_key: bool = False
    keeps_cancelled: bool = False


class TimeLimit(NamedTuple):
    """A timeout of a request.

    Attributes:
        is_until_start: whether it is its `timeout`; else its `deadline_ms`.
    """

    seconds: float
    is_until_start: bool


@dataclass(frozen=True)
class GenerateCall:
    """A request for text. Exactly one of `text` and `prompt_ids` is set.

    Attributes:
        prompt_text: text of the ids. draft_ids: the client's guess at the answer.
        num_bytes: of the request, as received.
        arrived_at: arrival at `tokenizer`, on the monotonic clock; None if it did not come from
            there.
        trace_id: of its W3C trace context; None if it came without.
    """

    key: str
    request_id: str
    text: str | None
    prompt_ids: Array | None
    prompt_text: str | None
    draft_ids: Array | None
    params: SamplingParams
    timeout_s: float | None
    options: OutputOptions
    num_bytes: int
    arrived_at: float | None
    trace_id: str | None = None

    @property
    def log_fields(self) -> dict[str, str | None]:
        """The fields of lines that concern it."""
        return request_fields(
            key=self.key,
            request_id=self.request_id,
            tenant=self.params.tenant,
            trace_id=self.trace_id,
        )

    @property
    def time_limit(self) -> TimeLimit | None:
        """The shorter of its timeouts before its start; None without any."""
        return _shortest(self.timeout_s, self.params)

    @property
    def wants_cumulative_logprob(self) -> bool:
        """True if log-probabilities must be summed."""
        return "cumulative_logprob" in self.options.names


@dataclass(frozen=True)
class CancelCall:
    """Cancels all requests of this id and tenant.

    Attributes:
        samples: indexes of the samples to cancel; None is the whole request.
    """

    request_id: str
    tenant: str
    samples: frozenset[int] | None = None


@dataclass(frozen=True)
class ProbeCall:
    """Asks for the state of the scheduler and its engine, see `probing`.

    Attributes:
        wants_text: whether to send the answer; else the response is empty.
    """

    wants_text: bool


Call = GenerateCall | CancelCall | ProbeCall


def parse(
    raw: RawRequest,
    relayed_key: str | None = None,
    *,
    limits: PromptLimits,
    sealer: Sealer,
    defaults: SamplingDefaults = NO_DEFAULTS,
    is_forwarded: Callable[[str], bool] = lambda name: False,
    tenant_header: str | None = None,
) -> Call:
    """Parse a request.

    Args:
        relayed_key: key of a request from `relay`; only its sender sees it.
        sealer: checks the names that `tokenizer` gives.
        defaults: of sampling parameters. is_forwarded: see `without_headers`.
        tenant_header: header that holds the tenant; None trusts the request's own `tenant`.

    Raises:
        InvalidRequestError: it is malformed; the message names the tensor or parameter.
        PromptTooLongError: the prompt is too long.
        NotSupportedError: it asks for something that charonia does not do.
    """
    tenant = None if tenant_header is None else tenant_of_header(raw.parameters, tenant_header)
    raw = replace(raw, parameters=without_headers(raw.parameters, is_forwarded))
    tensors = raw.tensors
    if read_flag(tensors, "probe"):
        return ProbeCall(wants_text="text_output" in raw.output_names)
    values = _sampling_values(raw)
    if tenant is not None:
        if values.get("tenant") not in (None, tenant):
            raise InvalidRequestError(
                f"tenant = {shown(values['tenant'])} is not what the header {tenant_header} says;"
                " leave it out"
            )
        values = {**values, "tenant": tenant}
    params = parse_sampling_params(values, defaults)
    samples = _read_samples(tensors)
    if read_flag(tensors, "cancel"):
        if not raw.request_id:
            raise InvalidRequestError("cancel needs the id of the request that it cancels")
        return CancelCall(raw.request_id, params.tenant, samples)
    if samples is not None:
        raise InvalidRequestError(
            f"{CANCEL_SAMPLES} says what cancel ends: give cancel = true, too"
        )
    text, prompt_ids = read_prompt(tensors, limits)
    name, prompt_text = _read_internal(tensors, prompt_ids, limits, sealer)
    options = _read_options(raw, params, has_name=name is not None)
    return GenerateCall(
        key=relayed_key or name or secrets.token_hex(16),
        request_id=raw.request_id,
        text=text,
        prompt_ids=prompt_ids,
        prompt_text=prompt_text,
        draft_ids=_read_draft_ids(raw, params, limits),
        params=params,
        timeout_s=_timeout_s(raw),
        options=options,
        num_bytes=raw.num_bytes,
        arrived_at=None if name is None else arrival_of(name),
        trace_id=trace_id_of(raw.traceparent),
    )


def read_time_limit(raw: RawRequest) -> TimeLimit | None:
    """The shorter of a request's timeouts before its start; None without any.

    Raises:
        InvalidRequestError: a timeout is malformed.
    """
    deadline_ms = _sampling_values(raw).get("deadline_ms")
    return _shortest(_timeout_s(raw), parse_sampling_params({"deadline_ms": deadline_ms}))


def read_prompt(
    tensors: Mapping[str, Array], limits: PromptLimits
) -> tuple[str | None, Array | None]:
    """The prompt: either a text or token ids.

    Raises:
        InvalidRequestError: both, none, or an empty one. PromptTooLongError: it is too long.
    """
    text = read_text(tensors, "text_input", limits.check_bytes)
    ids = tensors.get(INPUT_IDS)
    if (text is None) == (ids is None):
        problem = "there is none" if text is None else "both are given"
        raise InvalidRequestError(f"text_input or input_ids must be given, but {problem}")
    if ids is None:
        if not text:
            raise InvalidRequestError("text_input must not be empty")
        return text, None
    _check_ids(INPUT_IDS, ids)
    limits.check_ids(ids.size)
    return None, ids


def _read_draft_ids(raw: RawRequest, params: SamplingParams, limits: PromptLimits) -> Array | None:
    """The client's guess at the answer; None without one."""
    ids = raw.tensors.get(DRAFT_IDS)
    if ids is None or not ids.size:  # an ensemble sends an empty tensor for none
        return None
    _check_ids(DRAFT_IDS, ids)
    if ids.size > limits.max_ids:
        raise InvalidRequestError(
            f"{DRAFT_IDS} must have at most {limits.max_ids} tokens, but has {ids.size}"
        )
    if not params.speculation:
        raise InvalidRequestError(f"{DRAFT_IDS} together with speculation = false; leave one out")
    return ids


def _read_samples(tensors: Mapping[str, Array]) -> frozenset[int] | None:
    """Indexes of the samples to cancel; None is all."""
    indexes = tensors.get(CANCEL_SAMPLES)
    if indexes is None:
        return None
    _check_ids(CANCEL_SAMPLES, indexes)
    if indexes.size > MAX_SAMPLES:
        raise InvalidRequestError(
            f"{CANCEL_SAMPLES} must have at most {MAX_SAMPLES} indexes, but has {indexes.size}"
        )
    if (out_of_range := indexes[(indexes < 0) | (indexes >= MAX_SAMPLES)]).size:
        raise InvalidRequestError(
            f"{CANCEL_SAMPLES} must be indexes from 0 to {MAX_SAMPLES - 1}, but has "
            f"{out_of_range[0]}"
        )
    return frozenset(indexes.tolist())


def _check_ids(name: str, ids: Array) -> None:
    if ids.ndim != 1 or ids.dtype != np.int32 or not ids.size:
        raise InvalidRequestError(
            f"{name} must be a list of at least one INT32, but has shape {list(ids.shape)} "
            f"and type {ids.dtype}"
        )


def read_text(
    tensors: Mapping[str, Array], name: str, check_bytes: Callable[[str, int], None]
) -> str | None:
    """A STRING [1] input as text; None if it is absent.

    Args:
        check_bytes: raises if the input of this name has too many bytes.

    Raises:
        InvalidRequestError: it has another shape or type, or is not UTF-8.
    """
    array = tensors.get(name)
    if array is None:
        return None
    if array.size != 1 or array.dtype != np.object_:
        raise InvalidRequestError(_one_element(name, "string", array))
    value = array.item()
    check_bytes(name, len(value))
    return decoded(name, value)


def decoded(name: str, value: bytes | str) -> str:
    """An element of a STRING input as text.

    Raises:
        InvalidRequestError: it is not UTF-8.
    """
    if isinstance(value, str):
        return value
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None


def read_flag(tensors: Mapping[str, Array], name: str) -> bool | None:
    """A BOOL [1] input; None if it is absent.

    Raises:
        InvalidRequestError: it has another shape or type.
    """
    array = tensors.get(name)
    if array is None:
        return None
    if array.size != 1 or array.dtype != np.bool_:
        raise InvalidRequestError(_one_element(name, "boolean", array))
    return bool(array.item())


def _one_element(name: str, kind: str, array: Array) -> str:
    return f"{name} must be one {kind}, but has shape {list(array.shape)} and type {array.dtype}"


def _sampling_values(raw: RawRequest) -> Mapping[str, Any]:
    """The JSON object of the tensor, or else the request's own parameters.

    The parameters of `OF_REQUESTS` count in both places.
    """
    text = read_text(raw.tensors, SAMPLING_PARAMETERS, partial(_check_bytes, MAX_SAMPLING_BYTES))
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
    return {name: raw.parameters[name] for name in OF_REQUESTS if name in raw.parameters} | values


def _shortest(timeout_s: float | None, params: SamplingParams) -> TimeLimit | None:
    limits = []
    if timeout_s is not None:
        limits.append(TimeLimit(timeout_s, is_until_start=True))
    if params.deadline_ms is not None:
        limits.append(TimeLimit(params.deadline_ms / 1000, is_until_start=False))
    return min(limits, default=None)


def _timeout_s(raw: RawRequest) -> float | None:
    own_us = raw.timeout_us
    if own_us >= 2**63:  # Triton casts a negative one to unsigned
        own_us -= 2**64
    limits_us = [parse_timeout(own_us), parse_timeout(raw.parameters.get("timeout", 0))]
    return min((limit / 1e6 for limit in limits_us if limit), default=None)


def _check_bytes(max_bytes: int, name: str, num_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InvalidRequestError(
            f"{name} must have at most {max_bytes} bytes, but has {num_bytes}"
        )


def _read_internal(
    tensors: Mapping[str, Array], ids: Array | None, limits: PromptLimits, sealer: Sealer
) -> tuple[str | None, str | None]:
    """The name and the text that `tokenizer` sent with the ids, if it did.

    An ensemble sends an empty tensor for none.
    """
    given = {name: one for name, one in tensors.items() if one.size}
    key = read_text(given, REQUEST_KEY, partial(_check_bytes, _MAX_KEY_BYTES))
    text = read_text(given, PROMPT_TEXT, limits.check_bytes)
    if not key and not text:
        return None, None
    no_ids = np.array([], dtype=np.int32)
    return sealer.name_of(key or "", no_ids if ids is None else ids, text or ""), text or None


def _read_options(raw: RawRequest, params: SamplingParams, *, has_name: bool) -> OutputOptions:
    is_streaming = bool(read_flag(raw.tensors, "stream"))
    excludes = read_flag(raw.tensors, "exclude_input_in_output")
    if is_streaming and excludes is False:
        raise ExactTextError(ECHO_IN_STREAM)
    if is_streaming and params.num_samples > params.n:
        raise InvalidRequestError(
            f"best_of = {params.num_samples} with n = {params.n} cannot be streamed: which samples"
            " are the best is known at their ends; leave out stream, or best_of"
        )
    wanted = {out for flag, out in FLAGS.items() if read_flag(raw.tensors, flag)}
    wanted.add("text_output")
    if params.prompt_logprobs is not None:
        wanted.add("prompt_logprobs")
    names = frozenset(wanted) & raw.output_names
    return OutputOptions(
        is_streaming=is_streaming,
        has_echo="text_output" in names and not (is_streaming or excludes),
        names=names,
        has_key=has_name and REQUEST_KEY in raw.output_names,
        keeps_cancelled=not is_streaming
        and bool(read_flag(raw.tensors, "return_cancelled_output")),
    )
