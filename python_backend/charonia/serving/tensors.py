"""Triton's tensors and errors to plain Python values, and back.

Owns the names and types of all tensors, copying inputs out of shared memory, and building
responses. Must not know what the values mean: that is `schema`'s.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from charonia.errors import CharoniaError, InvalidRequestError

Array = npt.NDArray[Any]
Outputs = Mapping[str, list[Any]]
"""Values of a response by output name; each is a one-dimensional tensor."""

OUTPUT_TYPES: dict[str, type] = {
    "text_output": np.object_,
    "finish_reason": np.object_,
    "cumulative_logprob": np.float32,
    "logprobs": np.object_,
    "prompt_logprobs": np.object_,
    "num_input_tokens": np.uint32,
    "num_output_tokens": np.uint32,
    "output_ids": np.int32,
    "timing": np.object_,
}
"""What a client can get; `np.object_` is Triton's STRING."""

REQUEST_KEY = "request_key"
PROMPT_TEXT = "prompt_text"
INPUT_IDS = "input_ids"
_TYPES: dict[str, type] = OUTPUT_TYPES | {
    REQUEST_KEY: np.object_,
    PROMPT_TEXT: np.object_,
    INPUT_IDS: np.int32,
}
INTERNAL_ERROR = "internal error; the server's log has the details"


@dataclass(frozen=True)
class RawRequest:
    """A request as Triton gave it, safe to keep after `execute` returns.

    Attributes:
        tensors: the inputs that came, by name. parameters: its own parameters.
        timeout_us: of gRPC, 0 where there is none.
        output_names: what the client wants to get; all outputs when it named none.
    """

    tensors: Mapping[str, Array]
    parameters: Mapping[str, Any]
    request_id: str = ""
    timeout_us: int = 0
    output_names: frozenset[str] = frozenset(OUTPUT_TYPES)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(
            sum(map(len, array.flat)) if array.dtype == np.object_ else array.nbytes
            for array in self.tensors.values()
        )


def read_request(request: Any) -> RawRequest:
    """Copy everything out of a `pb_utils.InferenceRequest`.

    Raises:
        InvalidRequestError: its parameters are not a JSON object.
    """
    try:
        parameters = json.loads(request.parameters() or "{}")
    except (ValueError, RecursionError):
        raise InvalidRequestError("the request's parameters are not valid JSON") from None
    if not isinstance(parameters, dict):
        raise InvalidRequestError("the request's parameters are not a JSON object")
    return RawRequest(
        tensors={tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()},
        parameters=parameters,
        request_id=request.request_id(),
        timeout_us=request.timeout(),
        output_names=frozenset(request.requested_output_names()),
    )


def tensor(pb_utils: Any, name: str, values: Iterable[Any]) -> Any:
    """A one-dimensional `pb_utils.Tensor`; strings become UTF-8."""
    dtype = _TYPES[name]
    if dtype is np.object_:
        values = [v.encode() if isinstance(v, str) else v for v in values]
    return pb_utils.Tensor(name, np.array(list(values), dtype=dtype))


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
