"""Encodes requests for the server, and decodes its answers to chunks.

Owns the tensors' names and both encodings: protobuf for gRPC, JSON for HTTP `generate_stream`.
Must not know connections, timeouts or attempts.
"""

import json
import re
import struct
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import serialize_byte_tensor

from charonia_client.errors import InvalidRequest, ServerError
from charonia_client.values import (
    Chunk,
    EngineState,
    FinishReason,
    Include,
    Load,
    PositionLogprobs,
    Sampling,
    TokenLogprob,
)

Prompt = str | Sequence[int]
Inputs = dict[str, str | bool | list[int]]
Outputs = Mapping[str, Sequence[Any]]

_FLAGS: Mapping[Include, tuple[str, ...]] = {
    "token_ids": ("return_token_ids",),
    "num_tokens": ("return_num_input_tokens", "return_num_output_tokens"),
    "timing": ("return_timing",),
    "logprobs": ("return_logprobs",),
    "cumulative_logprob": ("return_cumulative_logprob",),
}
_HEADER_NAME = re.compile("[A-Za-z0-9_.-]+")
"""What both protocols accept."""
_FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
}


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request: its model and id, and its input tensors by name.

    Attributes:
        headers: sent with it, beside those of the client; as metadata over gRPC.
    """

    model: str
    request_id: str
    inputs: Inputs
    headers: Mapping[str, str] = field(default_factory=dict)


def generation_request(
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    *,
    request_id: str | None,
    include: Collection[Include],
    is_streaming: bool,
    headers: Mapping[str, str] | None = None,
) -> Request:
    """Return a request for text.

    It always asks for the finish reason, which identifies the last response, and never for the
    prompt's echo.

    Raises:
        InvalidRequest: the prompt is neither a text nor 32-bit token ids, or the sampling
            parameters cannot be written as JSON, or `include` has an unknown name, or the id or a
            header cannot be sent.
    """
    inputs: Inputs = {
        "stream": is_streaming,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "sampling_parameters": _sampling_json(sampling),
    }
    if isinstance(prompt, str):
        inputs["text_input"] = _text("the prompt", prompt)
    else:
        inputs["input_ids"] = _token_ids(prompt)
    wanted = set(include)
    if unknown := wanted - _FLAGS.keys():
        accepted = ", ".join(_FLAGS)
        raise InvalidRequest(f"include must be of {accepted}, but has {sorted(unknown)}")
    if sampling.get("logprobs") is not None:
        wanted.add("logprobs")
    inputs |= {flag: True for name in wanted for flag in _FLAGS[name]}
    if "token_ids" in wanted and sampling.get("n") not in (None, 1):
        inputs["return_num_output_tokens"] = True  # tells which token ids belong to which sample
    request_id = _text("request_id", request_id or uuid.uuid4().hex)
    return Request(model, request_id, inputs, _checked(headers or {}))


def cancel_request(
    model: str, request_id: str, tenant: str, samples: Sequence[int] | None
) -> Request:
    """Return a request that cancels the live requests of this id and tenant.

    Args:
        samples: only these of each; None is all of it.

    Raises:
        InvalidRequest: `samples` is empty, or the id cannot be sent.
    """
    sampling: Sampling = {"tenant": tenant} if tenant else {}
    inputs: Inputs = {"cancel": True, "sampling_parameters": _sampling_json(sampling)}
    if samples is not None:
        inputs["cancel_samples"] = _integers("samples", samples)
        if not inputs["cancel_samples"]:
            raise InvalidRequest("samples must name at least one, or be None for all")
    return Request(model, _text("request_id", request_id), inputs)


def probe_request(model: str) -> Request:
    """Return a request for the state of the scheduler and its engine."""
    return Request(model, uuid.uuid4().hex, {"probe": True})


def read_state(text: str) -> EngineState:
    """Read the answer to a probe.

    Raises:
        ServerError: it is malformed.
    """
    try:
        values = json.loads(text)
        return EngineState(
            is_up=values["engine_up"],
            reason=values["reason"],
            step_age_s=values["step_age_s"],
            turn_age_s=values["turn_age_s"],
            max_model_len=values.get("max_model_len"),
            load=_read_load(values.get("load")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"the answer to a probe cannot be understood: {error!r}") from error


def _read_load(values: Mapping[str, Any] | None) -> Load | None:
    """Read the load in an answer, as far as it is the load that this client knows.

    Another version of the server may have further fields, which are left out, or lack some: then
    there is no load.
    """
    names = [field.name for field in fields(Load)]
    if values is None or not values.keys() >= set(names):
        return None
    return Load(**{name: values[name] for name in names})


def to_grpc(request: Request) -> service_pb2.ModelInferRequest:
    """Encode the request as protobuf."""
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    for name, value in request.inputs.items():
        if isinstance(value, str):
            raw = serialize_byte_tensor(np.array([value.encode()], dtype=np.object_)).item()
            message.inputs.add(name=name, datatype="BYTES", shape=[1])
        elif isinstance(value, bool):
            raw = np.array([value], dtype=np.bool_).tobytes()
            message.inputs.add(name=name, datatype="BOOL", shape=[1])
        else:
            raw = np.array(value, dtype=np.int32).tobytes()
            message.inputs.add(name=name, datatype="INT32", shape=[len(value)])
        message.raw_input_contents.append(raw)
    return message


def to_http(request: Request, timeout_s: float | None) -> dict[str, Any]:
    """Encode the request as the JSON object of `generate_stream`.

    Args:
        timeout_s: sent to the server, because it notices a dropped connection only at the next
            response that it sends. (Over gRPC the deadline travels with the call.)
    """
    body: dict[str, Any] = {"id": request.request_id, **request.inputs}
    if timeout_s is not None:
        body["timeout"] = max(1, int(timeout_s * 1e6))
    return body


def from_grpc(response: service_pb2.ModelInferResponse) -> Outputs:
    """Return the outputs of a response as plain values.

    Raises:
        ServerError: the bytes of a tensor do not fit its type and shape.
    """
    result = InferResult(response)
    try:
        return {
            output.name: [
                value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
                for value in result.as_numpy(output.name).reshape(-1).tolist()
            ]
            for output in response.outputs
        }
    except (ValueError, struct.error) as error:
        raise ServerError(f"a response cannot be understood: {error!r}") from error


def from_http(event: Mapping[str, Any]) -> Outputs:
    """Return the outputs of one SSE event. Triton writes a list of one element as that element."""
    return {
        name: value if isinstance(value, list) else [value]
        for name, value in event.items()
        if name not in ("id", "model_name", "model_version")
    }


class ResponseReader:
    """Decodes the responses of one request.

    Each response has all samples, also those that have ended; for these there are no more chunks.
    An output may be absent, or present and empty (in an ensemble).
    """

    def __init__(self) -> None:
        self._num_samples: int | None = None
        self._ended: set[int] = set()

    def read(self, outputs: Outputs) -> tuple[Chunk, ...]:
        """Return a chunk for each sample that has something new.

        Raises:
            ServerError: an output is malformed.
        """
        num_samples = self._count_samples(outputs)
        try:
            chunks = [self._chunk(outputs, index) for index in range(num_samples)]
            new = [one for one in chunks if self._has_news(one, num_samples)]
            self._ended.update(one.index for one in chunks if one.finish_reason is not None)
            if new:
                prompt_logprobs = _prompt_logprobs(_first(outputs, "prompt_logprobs"))
                new[0] = replace(new[0], prompt_logprobs=prompt_logprobs)
                timing = json.loads(_first(outputs, "timing") or "null")
                is_final = len(self._ended) == num_samples
                new[-1] = replace(new[-1], timing=timing, is_final=is_final)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerError(f"a response cannot be understood: {error!r}") from error
        return tuple(new)

    def _count_samples(self, outputs: Outputs) -> int:
        num_texts = len(outputs.get("text_output", ()))
        if not num_texts:
            raise ServerError("a response must carry a text_output of each sample, but has none")
        self._num_samples = self._num_samples or num_texts
        if num_texts != self._num_samples:
            raise ServerError(
                f"each response must carry {self._num_samples} text_output, as the first one did, "
                f"but one carries {num_texts}"
            )
        return num_texts

    def _chunk(self, outputs: Outputs, index: int) -> Chunk:
        return Chunk(
            text=outputs["text_output"][index],
            index=index,
            token_ids=_own_token_ids(outputs, index),
            finish_reason=_finish_reason(_of(outputs, "finish_reason", index)),
            logprobs=_logprobs(_of(outputs, "logprobs", index)),
            cumulative_logprob=_of(outputs, "cumulative_logprob", index),
            num_input_tokens=_first(outputs, "num_input_tokens"),
            num_output_tokens=_of(outputs, "num_output_tokens", index),
        )

    def _has_news(self, chunk: Chunk, num_samples: int) -> bool:
        has_more = bool(chunk.text or chunk.token_ids)
        if chunk.index not in self._ended:
            return has_more or chunk.finish_reason is not None or num_samples == 1
        if has_more:
            raise ServerError(f"sample {chunk.index} goes on after its end")
        return False


def _of(outputs: Outputs, name: str, index: int) -> Any:
    """Return a sample's element of an output; None if there is none."""
    values = outputs.get(name, ())
    num_samples = len(outputs["text_output"])
    if values and len(values) != num_samples:
        raise ServerError(
            f"{name} must have {num_samples} elements, as text_output has, but has {len(values)}"
        )
    return values[index] if values else None


def _own_token_ids(outputs: Outputs, index: int) -> tuple[int, ...]:
    """Return a sample's part of the token ids, which are concatenated over the samples."""
    ids = tuple(outputs.get("output_ids", ()))
    if len(outputs["text_output"]) == 1 or not ids:
        return ids
    counts = [_of(outputs, "num_output_tokens", each) for each in range(index + 1)]
    if None in counts:
        raise ServerError("output_ids of several samples came without num_output_tokens")
    first = sum(counts[:-1])
    return ids[first : first + counts[-1]]


def _first(outputs: Outputs, name: str) -> Any:
    values = outputs.get(name, ())
    return values[0] if values else None


def _finish_reason(text: str | None) -> FinishReason | None:
    if text in (None, "", "None"):
        return None
    if text not in _FINISH_REASONS:
        accepted = ", ".join(_FINISH_REASONS)
        raise ServerError(f"finish_reason must be None or one of {accepted}, but is {text!r}")
    return _FINISH_REASONS[text]


def _logprobs(text: str | None) -> tuple[PositionLogprobs, ...] | None:
    positions = json.loads(text or "null")
    return None if positions is None else tuple(_position(each) for each in positions)


def _prompt_logprobs(text: str | None) -> tuple[PositionLogprobs | None, ...] | None:
    positions = json.loads(text or "null")
    if positions is None:
        return None
    return tuple(None if each is None else _position(each) for each in positions)


def _position(entries: Mapping[str, Any]) -> PositionLogprobs:
    return tuple(
        TokenLogprob(int(token_id), entry["logprob"], entry["rank"], entry["decoded_token"])
        for token_id, entry in entries.items()
    )


def _sampling_json(sampling: Sampling) -> str:
    given = {name: value for name, value in sampling.items() if value is not None}
    try:
        return json.dumps(given, default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"the sampling parameters cannot be written as JSON: {error}"
        ) from None


def _plain(value: object) -> object:
    """Convert numpy's numbers and arrays to Python's; any other foreign type is an error."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is neither a number, a text, a list nor a mapping")


def _text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is no Unicode text: {error}") from None
    return text


def _checked(headers: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise InvalidRequest(
                f"a header's name must have letters, digits, '-', '_' and '.' only, but is {name!r}"
            )
        if not (value.isascii() and value.isprintable()):
            raise InvalidRequest(
                f"the header {name} must have printable ASCII characters only, but is {value!r}"
            )
    return headers


def _token_ids(prompt: Sequence[int]) -> list[int]:
    return _integers("the prompt", prompt, "a text or a list of token ids")


def _integers(name: str, values: Sequence[int], accepted: str = "a list of integers") -> list[int]:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of unequal lengths
        array = np.empty((0, 0))
    if array.size == 0 and array.ndim == 1:
        return []  # the server will report the error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidRequest(f"{name} must be {accepted}")
    limits = np.iinfo(np.int32)
    if array.min() < limits.min or array.max() > limits.max:
        raise InvalidRequest(f"{name} must be integers of 32 bits")
    integers: list[int] = array.tolist()
    return integers
