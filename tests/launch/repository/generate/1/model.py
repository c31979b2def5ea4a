"""Answers with what came, through the response sender.

"slow" is answered once there is a file `answer-slow` in the repository; "hold" never is, and after
"hang" nothing is. Whoever has taken one of these leaves a file there, as `slow-PID`. A file
`refuse-to-load-again` makes `initialize` raise, and `load-slowly` makes it wait for as long as that
is there.
"""

import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from charonia.serving.open_calls import OpenCalls

REPOSITORY = Path(__file__).parents[2]


class TritonPythonModel:
    def initialize(self, args):
        if (REPOSITORY / "refuse-to-load-again").exists():
            raise RuntimeError("the stand-in refuses to load again")
        while (REPOSITORY / "load-slowly").exists():
            time.sleep(0.1)
        self.held = []
        self.open_calls = OpenCalls()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            tensor = pb_utils.get_input_tensor_by_name(request, "text_input")
            text = np.array([b""], dtype=object) if tensor is None else tensor.as_numpy()
            if text[0] == b"hold":
                self.held.append(sender)
                self.open_calls.note(len(self.held))
            if text[0] in (b"slow", b"hold", b"hang"):
                (REPOSITORY / f"{text[0].decode()}-{os.getpid()}").touch()
            if text[0] == b"hang":
                time.sleep(3600)
            while text[0] == b"slow" and not (REPOSITORY / "answer-slow").exists():
                time.sleep(0.05)
            if text[0] == b"hold":
                continue
            response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
