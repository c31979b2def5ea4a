"""What Triton gets of a request's inputs."""

import numpy as np
import pytest
from tritonclient.utils import deserialize_bytes_tensor

from triton_inputs import infer_input


@pytest.mark.parametrize(
    ("kind", "dtype", "values"),
    [("INT32", np.int32, [1, 70_000]), ("BOOL", np.bool_, [True])],
)
def test_numbers_are_sent_as_they_lie_in_memory(kind, dtype, values):
    tensor = infer_input("name", kind, values)
    assert (tensor.name(), tensor.datatype(), tensor.shape()) == ("name", kind, [len(values)])
    assert np.frombuffer(tensor._get_content(), dtype).tolist() == values


def test_text_is_sent_as_utf_8():
    tensor = infer_input("text_input", "BYTES", ["für"])
    assert (tensor.datatype(), tensor.shape()) == ("BYTES", [1])
    assert deserialize_bytes_tensor(tensor._get_content())[0].decode() == "für"
