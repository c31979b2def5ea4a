"""A request as it came: named tensors and parameters that mean nothing yet.

Owns the shape, and what its tensors are in Python. Must not know who brought it: Triton, see
`tensors`, or a socket, see `relay`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from charonia.serving.conventions.interface import OUTPUTS, Datatype

Array = npt.NDArray[Any]
Outputs = Mapping[str, Any]
"""Values of a response by output name: a list of one dimension, or an array as it is to be sent."""

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


@dataclass(frozen=True)
class RawRequest:
    """A request as its client gave it, safe to keep after `execute` returns.

    Attributes:
        tensors: the inputs that came, by name. parameters: its own parameters.
        timeout_us: of gRPC, 0 where there is none. num_bytes: of all of it.
        output_names: what the client wants to get; all outputs when it named none.
    """

    tensors: Mapping[str, Array]
    parameters: Mapping[str, Any]
    request_id: str = ""
    timeout_us: int = 0
    output_names: frozenset[str] = frozenset(one.name for one in OUTPUTS)
    num_bytes: int = 0


def num_bytes_of(array: Array) -> int:
    """Bytes of what is in a tensor."""
    return sum(map(len, array.flat)) if array.dtype == np.object_ else array.nbytes
