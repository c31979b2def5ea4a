"""Streams what the prompt tells it to: delays, errors in mid-stream, streams that never end.

The prompt (`text_input`) is a JSON script:

- `chunks`: texts, one response each, or lists with one of each sample; `token_ids`: ids per chunk;
  `forever`: repeat them for ever;
- `delay_s`: before each response, or `delays_s`: before each chunk; a cancellation cuts it short;
- `finish`: the last chunk's finish_reason, null for none; or `reasons`: each chunk's, as lists;
- `error` and `code`: raised after the chunks; `failures`: only for so many attempts of this id;
- `raw`: more output tensors of the last response, by name, as lists;
- `report`: an id; answers with how that request ended: "running", "cancelled", "done", "error";
- `echo`: answers with the request itself, as JSON.

A request without a prompt but with `cancel` ends the requests of its id, without a response.
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

DTYPES = {
    "cumulative_logprob": np.float32,
    "num_input_tokens": np.uint32,
    "num_output_tokens": np.uint32,
    "output_ids": np.int32,
}


def tensor(name, values):
    """A tensor of `values` of the type that the interface gives to `name`."""
    return pb_utils.Tensor(name, np.array(values, dtype=DTYPES.get(name, np.object_)))


def read_inputs(request):
    """All inputs as plain values; single elements as scalars."""
    inputs = {}
    for each in request.inputs():
        values = [v.decode() if isinstance(v, bytes) else v.item() for v in each.as_numpy()]
        inputs[each.name()] = values if each.name() == "input_ids" else values[0]
    return inputs


class TritonPythonModel:
    """One thread per request."""

    def initialize(self, args):
        """Start with an empty record."""
        self.outcome = {}
        self.attempts = {}
        self.to_cancel = set()

    def execute(self, requests):
        """Hand every request to a thread of its own."""
        for request in requests:
            work = (request.get_response_sender(), request.request_id(), read_inputs(request))
            parameters = json.loads(request.parameters() or "{}")
            threading.Thread(target=self.run, args=(*work, parameters), daemon=True).start()

    def run(self, sender, request_id, inputs, parameters):
        """Play the script, and record how it ended."""
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if inputs.get("cancel"):
            self.to_cancel.add(request_id)
            return sender.send(flags=final)
        prompt = inputs.get("text_input", '{"echo": true}')
        script = json.loads(prompt) if prompt.startswith("{") else {"echo": True}
        if "report" in script:
            script = {"chunks": [self.outcome.get(script["report"], "unknown")]}
        if "echo" in script:
            seen = {"id": request_id, "inputs": inputs, "parameters": parameters}
            script = {"chunks": [json.dumps(seen)]}
        self.attempts[request_id] = self.attempts.get(request_id, 0) + 1
        if self.attempts[request_id] > script.get("failures", 1 << 30):
            script.pop("error")
        self.outcome[request_id] = "running"
        self.outcome[request_id] = self.play(sender, request_id, script, final)

    def is_cancelled_within(self, seconds, sender, request_id):
        """Wait so long, or until somebody cancels the request; whether somebody does."""
        deadline = time.monotonic() + seconds
        while not (sender.is_cancelled() or request_id in self.to_cancel):
            if (remaining := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(remaining, 0.02))
        return True

    def play(self, sender, request_id, script, final):
        """Send the responses; answers how it ended."""
        chunks = script.get("chunks", [])
        token_ids = script.get("token_ids", [[7]] * len(chunks))
        last = len(chunks) - 1 if "error" not in script else -1
        delay_s = script.get("delay_s", 0)
        delays = script.get("delays_s", [delay_s] * len(chunks))
        while True:
            for index, text in enumerate(chunks):
                if self.is_cancelled_within(delays[index], sender, request_id):
                    # Triton 2.51.0 may crash when an answer ends while its cancellation is
                    # still on its way through the gRPC front end.
                    time.sleep(0.2)
                    message = "the request was cancelled [charonia:cancelled]"
                    cancelled = pb_utils.TritonError(message, pb_utils.TritonError.CANCELLED)
                    sender.send(pb_utils.InferenceResponse(error=cancelled), flags=final)
                    return "cancelled"
                is_last = index == last and not script.get("forever")
                finish = script.get("finish", "stop") if is_last else "None"
                texts = text if isinstance(text, list) else [text]
                tensors = [tensor("text_output", texts), tensor("output_ids", token_ids[index])]
                if "reasons" in script:
                    tensors.append(tensor("finish_reason", script["reasons"][index]))
                elif finish is not None:
                    tensors.append(tensor("finish_reason", [finish]))
                raw = script.get("raw", {}) if is_last else {}
                tensors += [tensor(name, values) for name, values in raw.items()]
                sender.send(pb_utils.InferenceResponse(tensors), flags=final if is_last else 0)
            if not script.get("forever"):
                break
        if "error" in script:
            time.sleep(delay_s)
            code = getattr(pb_utils.TritonError, script.get("code", "INTERNAL"))
            error = pb_utils.TritonError(script["error"], code)
            sender.send(pb_utils.InferenceResponse(error=error), flags=final)
            return "error"
        if last < 0:
            sender.send(flags=final)
        return "done"
