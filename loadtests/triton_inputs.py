"""A request's inputs as tritonclient takes them.

Owns how values become a tensor of one dimension. Must not know which inputs there are.
"""

from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import triton_to_np_dtype


def infer_input(name: str, kind: str, values: Any) -> grpc.InferInput:
    """One input.

    Args:
        kind: Triton's name of its type, such as "INT32". values: a sequence or an array of them;
            text is encoded as UTF-8.
    """
    array = np.asarray(values, triton_to_np_dtype(kind))
    tensor = grpc.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor
