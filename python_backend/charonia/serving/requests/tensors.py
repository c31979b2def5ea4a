"""Converts Triton's tensors and errors to plain Python values, and back.

Owns the copying of inputs out of shared memory, and the building of responses. Must not know the
meaning of values; `schema` does.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from charonia.errors import CharoniaError, InvalidRequestError, NotSupportedError, shown
from charonia.serving.conventions.interface import MODELS
from charonia.serving.requests.raw_request import NUMPY_TYPES, Outputs, RawRequest, num_bytes_of
from charonia.tracing.traceparent import (
    TRACEPARENT,
    TraceContext,
    parse_traceparent,
    trace_id_of,
)

_TYPES = {one.name: NUMPY_TYPES[one.datatype] for model in MODELS.values() for one in model.outputs}
MAX_REQUEST_BYTES = 2**26
MAX_PARAMETER_BYTES = 2**20
MAX_ID_BYTES = 1024
"""Limits of a request, far beyond any real use."""
INTERNAL_ERROR = "internal error; the server's log has the details"


def read_request(request: Any) -> RawRequest:
    """Copy all data out of a `pb_utils.InferenceRequest`.

    Raises:
        InvalidRequestError: it is far too large, its parameters are not a JSON object, or its id or
            a parameter is not UTF-8.
    """
    try:
        return _read_request(request)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"the request's id and parameters must be UTF-8: {error.reason} at byte {error.start}"
        ) from None


def _read_request(request: Any) -> RawRequest:
    request_id, text = request.request_id(), request.parameters() or "{}"
    _check_size("id", len(request_id.encode()), MAX_ID_BYTES)
    _check_size("parameters", len(text), MAX_PARAMETER_BYTES)
    arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    num_bytes = sum(map(num_bytes_of, arrays.values()))
    _check_size("tensors", num_bytes, MAX_REQUEST_BYTES)
    try:
        parameters = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError):
        raise InvalidRequestError("the request's parameters are not valid JSON") from None
    if not isinstance(parameters, dict):
        raise InvalidRequestError("the request's parameters are not a JSON object")
    return RawRequest(
        tensors={name: np.array(array) for name, array in arrays.items()},
        parameters=parameters,
        request_id=request_id,
        timeout_us=request.timeout(),
        output_names=frozenset(request.requested_output_names()),
        num_bytes=num_bytes + len(text) + len(request_id),
        traceparent=traceparent_of(request, parameters),
    )


def traceparent_of(request: Any, parameters: Mapping[str, Any]) -> str | None:
    """The context in Triton's trace of the request, or else its client's; None without both.

    Over gRPC Triton 2.51.0 at times fails to read a client's context. It seems to take what lies in
    memory behind the header as a part of it. It then does not trace the request, or begins another
    trace. Without traces Triton reads none, and the client's is for the log.

    Args:
        parameters: of the request; they have the header if Triton forwards it, in any case over
            HTTP.
    """
    text = request.trace().get_context()
    context = json.loads(text).get("traceparent") if text else None
    clients = _context_in(parameters)
    if clients is None or clients.hex_trace_id == trace_id_of(context):
        return context
    return clients.traceparent if clients.is_sampled or context is None else context


def _context_in(parameters: Mapping[str, Any]) -> TraceContext | None:
    """The last context that is valid: a proxy may have added it."""
    found = None
    for name, value in parameters.items():
        if name.lower() == TRACEPARENT and isinstance(value, str):
            found = parse_traceparent(value) or found
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises InvalidRequestError: a name occurs twice, so that its value is ambiguous.

    Of several trace contexts the last one counts, see `_context_in`.
    """
    names = dict(pairs)
    if len(names) < len(pairs):
        given = [name for name, _ in pairs if name.lower() != TRACEPARENT]
        name = next((name for name in names if given.count(name) > 1), None)
        if name is None:
            return names
        raise InvalidRequestError(
            f"the request's parameter {shown(name)} is given more than once; a header may have its"
            " name"
        )
    return names


def _check_size(what: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InvalidRequestError(
            f"of the request's {what} at most {max_bytes} bytes are accepted, but {num_bytes} came"
        )


def tensor(pb_utils: Any, name: str, values: Iterable[Any]) -> Any:
    """A `pb_utils.Tensor`: an array as it is, or a list of one dimension, its strings as UTF-8."""
    if not isinstance(values, np.ndarray):
        encoded = [value.encode() if isinstance(value, str) else value for value in values]
        values = np.array(encoded, dtype=_TYPES[name])
    return pb_utils.Tensor(name, values)


def response(pb_utils: Any, outputs: Outputs) -> Any:
    """A `pb_utils.InferenceResponse` with these outputs."""
    return pb_utils.InferenceResponse(
        [tensor(pb_utils, name, values) for name, values in outputs.items()]
    )


def error_response(pb_utils: Any, error: CharoniaError) -> Any:
    """A `pb_utils.InferenceResponse` with the error's text, kind and code."""
    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError(error.answer, getattr(pb_utils.TritonError, error.code))
    )


def refuse_all(pb_utils: Any, requests: list[Any]) -> list[Any]:
    """Refuse requests to a model that only other models use, and not through Triton."""
    refusal = NotSupportedError("this model takes no requests; send them to the scheduler")
    return [error_response(pb_utils, refusal) for _ in requests]
