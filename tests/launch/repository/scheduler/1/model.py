"""Answers `max_tokens` words, `delay` seconds apart.

The text "hang" leaves a file `hang-PID` in the repository, and `execute` never returns, so no later
request is answered. A file `refuse-to-load` there makes `initialize` raise, `refuse-to-serve` makes
every request fail, and `end-streams` makes every answer's next word its last.
"""

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

REPOSITORY = Path(__file__).parents[2]


class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_info("the stand-in scheduler loads")
        if (REPOSITORY / "refuse-to-load").exists():
            raise RuntimeError("the stand-in refuses to load")

    def execute(self, requests):
        for request in requests:
            parameters = json.loads(request.parameters() or "{}")
            text = pb_utils.get_input_tensor_by_name(request, "text_input")
            if text is not None and text.as_numpy()[0] == b"hang":
                (REPOSITORY / f"hang-{os.getpid()}").touch()
                time.sleep(3600)
            sender = request.get_response_sender()
            is_probe = any(tensor.name() == "probe" for tensor in request.inputs())
            target = answer_probe if is_probe else answer
            threading.Thread(target=target, args=(sender, parameters), daemon=True).start()


def answer_probe(sender, parameters):
    if (REPOSITORY / "refuse-to-serve").exists():
        return answer(sender, parameters)
    state = {"engine_up": True, "reason": None, "step_age_s": 0, "turn_age_s": 0}
    text = np.array([json.dumps(state).encode()], dtype=object)
    response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def answer(sender, parameters):
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    if (REPOSITORY / "refuse-to-serve").exists():
        error = pb_utils.TritonError("the queue is full", pb_utils.TritonError.UNAVAILABLE)
        sender.send(pb_utils.InferenceResponse(error=error), flags=final)
        return
    num_words = int(parameters.get("max_tokens", 1))
    for index in range(num_words):
        time.sleep(float(parameters.get("delay", 0)))
        is_last = index == num_words - 1 or (REPOSITORY / "end-streams").exists()
        word = np.array([f"word{index} ".encode()], dtype=object)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", word)])
        sender.send(response, flags=final if is_last else 0)
        if is_last:
            return
