"""Answers `max_tokens` words, `delay` seconds apart. Which way it fails is asked for by parameters.

hang: `execute` never returns, so no later request is answered. refuse: an UNAVAILABLE error.
A file `refuse-to-load` in the repository makes `initialize` raise, and one named `refuse-to-serve`
makes every request fail.
"""

import json
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
            if parameters.get("hang"):
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
    if parameters.get("refuse") or (REPOSITORY / "refuse-to-serve").exists():
        error = pb_utils.TritonError("the queue is full", pb_utils.TritonError.UNAVAILABLE)
        sender.send(pb_utils.InferenceResponse(error=error), flags=final)
        return
    num_words = int(parameters.get("max_tokens", 1))
    for index in range(num_words):
        time.sleep(float(parameters.get("delay", 0)))
        word = np.array([f"word{index} ".encode()], dtype=object)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", word)])
        sender.send(response, flags=final if index == num_words - 1 else 0)
