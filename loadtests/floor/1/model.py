"""Answers a request of `scheduler` with one token, after as long a sleep as it asks for.

`sampling_parameters` is `{"sleep_s": ...}`.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The least that a model in Triton's Python backend does."""

    def execute(self, requests):
        """Sleep, and answer."""
        for request in requests:
            inputs = {each.name(): each.as_numpy() for each in request.inputs()}
            time.sleep(json.loads(inputs["sampling_parameters"][0])["sleep_s"])
            outputs = [
                pb_utils.Tensor("text_output", np.array([b"a"], dtype=np.object_)),
                pb_utils.Tensor("num_output_tokens", np.array([1], dtype=np.uint32)),
            ]
            request.get_response_sender().send(
                pb_utils.InferenceResponse(outputs),
                flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
