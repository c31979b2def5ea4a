"""A raw request: named tensors and parameters, not interpreted yet.

Owns its form, and the Python types of tensors. Must not know where it came from: Triton, see
`tensors`, or a socket, see `relay`.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from charonia.events import request_fields
from charonia.protocol.sampling_params import MAX_CHARACTERS
from charonia.serving.conventions.interface import OUTPUTS, SAMPLING_PARAMETERS, Datatype
from charonia.tracing.traceparent import trace_id_of

Array = npt.NDArray[Any]
Outputs = Mapping[str, Any]
"""Values of a response by output name: a list of one dimension, or an array of any shape."""

NUMPY_TYPES: dict[Datatype, type] = {
    "BOOL": np.bool_,
    "FP16": np.float16,
    "FP32": np.float32,
    "INT32": np.int32,
    "STRING": np.object_,
    "UINT8": np.uint8,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}


_MAX_READ_BYTES = 2**14
"""Most bytes of sampling parameters that are read for a log line; others are checked first."""


@dataclass(frozen=True)
class RawRequest:
    """A request as its client sent it, safe to keep after `execute` returns.

    Attributes:
        tensors: the inputs that are present, by name. parameters: the request's own parameters.
        timeout_us: gRPC's timeout in microseconds; 0 is none. num_bytes: size of the request.
        output_names: outputs that the client wants; all if it named none.
        traceparent: its W3C trace context, sampled or not; None if it came with none.
    """

    tensors: Mapping[str, Array]
    parameters: Mapping[str, Any]
    request_id: str = ""
    timeout_us: int = 0
    output_names: frozenset[str] = frozenset(one.name for one in OUTPUTS)
    num_bytes: int = 0
    traceparent: str | None = None

    @cached_property
    def log_fields(self) -> Mapping[str, str | None]:
        """The fields of lines that concern it. Its tenant is the one that it names itself."""
        tenant = self._named("tenant")
        return request_fields(
            request_id=self.request_id,
            tenant=tenant[: MAX_CHARACTERS["tenant"]] if isinstance(tenant, str) else None,
            trace_id=trace_id_of(self.traceparent),
        )

    def _named(self, name: str) -> object:
        """A sampling parameter, wherever it is; None without it, or if it cannot be read soon."""
        array = self.tensors.get(SAMPLING_PARAMETERS)
        text = None if array is None or array.size != 1 else array.item()
        if isinstance(text, bytes) and len(text) <= _MAX_READ_BYTES and name.encode() in text:
            with contextlib.suppress(ValueError, RecursionError):
                values = json.loads(text)
                if isinstance(values, dict) and name in values:
                    return values[name]
        return self.parameters.get(name)


def num_bytes_of(array: Array) -> int:
    """Bytes of a tensor's contents."""
    return sum(map(len, array.flat)) if array.dtype == np.object_ else array.nbytes
