"""A request as the server wants it, and what the server answers as chunks.

Owns the tensors' names and both encodings: protobuf for gRPC, JSON for HTTP `generate_stream`.
Must not know connections, timeouts or attempts.
"""

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import serialize_byte_tensor

from charonia_client.errors import InvalidRequest, ServerError
from charonia_client.values import (
    Chunk,
    FinishReason,
    Include,
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
_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request: what it is for, and its input tensors by name."""

    model: str
    request_id: str
    inputs: Inputs


def generation_request(
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    *,
    request_id: str | None,
    include: Collection[Include],
    is_streaming: bool,
) -> Request:
    """A request for text.

    The finish reason is always asked for: it is how the last response is known. The prompt is
    never asked back.

    Raises:
        InvalidRequest: the prompt is neither a text nor 32-bit token ids, or the sampling
            parameters are no JSON, or `include` holds an unknown name.
    """
    inputs: Inputs = {
        "stream": is_streaming,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "sampling_parameters": _sampling_json(sampling),
    }
    if isinstance(prompt, str):
        inputs["text_input"] = _text(prompt)
    else:
        inputs["input_ids"] = _token_ids(prompt)
    wanted = set(include)
    if unknown := wanted - _FLAGS.keys():
        accepted = ", ".join(_FLAGS)
        raise InvalidRequest(f"include must be of {accepted}, but has {sorted(unknown)}")
    if sampling.get("logprobs") is not None:
        wanted.add("logprobs")
    inputs |= {flag: True for name in wanted for flag in _FLAGS[name]}
    return Request(model, request_id or uuid.uuid4().hex, inputs)


def cancel_request(model: str, request_id: str, tenant: str) -> Request:
    """A request that cancels the live requests of this id and tenant."""
    sampling: Sampling = {"tenant": tenant} if tenant else {}
    inputs: Inputs = {"cancel": True, "sampling_parameters": _sampling_json(sampling)}
    return Request(model, request_id, inputs)


def to_grpc(request: Request) -> service_pb2.ModelInferRequest:
    """The request as protobuf."""
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
    """The request as the JSON object of `generate_stream`.

    Args:
        timeout_s: told to the server, which notices a dropped connection only at the next
            response that it sends. (Over gRPC the deadline travels with the call.)
    """
    body: dict[str, Any] = {"id": request.request_id, **request.inputs}
    if timeout_s is not None:
        body["timeout"] = max(1, int(timeout_s * 1e6))
    return body


def from_grpc(response: service_pb2.ModelInferResponse) -> Outputs:
    """The outputs of a response as plain values."""
    result = InferResult(response)
    return {
        output.name: [
            value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
            for value in result.as_numpy(output.name).reshape(-1).tolist()
        ]
        for output in response.outputs
    }


def from_http(event: Mapping[str, Any]) -> Outputs:
    """The outputs of one SSE event; Triton writes a list of one element as that element."""
    return {
        name: value if isinstance(value, list) else [value]
        for name, value in event.items()
        if name not in ("id", "model_name", "model_version")
    }


def to_chunk(outputs: Outputs) -> Chunk:
    """A response as a chunk. An output may be absent, or present and empty (in an ensemble).

    Raises:
        ServerError: an output is not what it should be.
    """
    texts = outputs.get("text_output", ())
    if len(texts) != 1:
        raise ServerError(f"a response must carry one text_output, but carries {len(texts)}")
    try:
        return Chunk(
            text=texts[0],
            token_ids=tuple(outputs.get("output_ids", ())),
            finish_reason=_finish_reason(_first(outputs, "finish_reason")),
            logprobs=_logprobs(_first(outputs, "logprobs")),
            prompt_logprobs=_prompt_logprobs(_first(outputs, "prompt_logprobs")),
            cumulative_logprob=_first(outputs, "cumulative_logprob"),
            num_input_tokens=_first(outputs, "num_input_tokens"),
            num_output_tokens=_first(outputs, "num_output_tokens"),
            timing=json.loads(_first(outputs, "timing") or "null"),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"a response cannot be understood: {error!r}") from error


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
    """Numpy's numbers and arrays as Python's; any other foreign type is an error."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is neither a number, a text, a list nor a mapping")


def _text(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the prompt is no Unicode text: {error}") from None
    return prompt


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        array = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        array = np.empty((0, 0))
    if array.size == 0 and array.ndim == 1:
        return []  # the server says what it thinks of that
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidRequest("the prompt must be a text or a list of token ids")
    limits = np.iinfo(np.int32)
    if array.min() < limits.min or array.max() > limits.max:
        raise InvalidRequest("token ids must fit into 32 bits")
    ids: list[int] = array.tolist()
    return ids
