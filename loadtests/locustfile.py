"""Load test: users that stream completions over gRPC or HTTP, with time to first token.

    locust -f loadtests/locustfile.py --headless -u 16 -r 4 -t 30s \\
        --host 127.0.0.1:8001 GrpcUser          # or: --host http://127.0.0.1:8000 HttpUser

Reported per request: `ttft` (to the first chunk), `total`, and the number of bytes received.
"""

import json
import logging
import queue
import random
import time

import grpc.experimental.gevent as gevent_grpc
import httpx
import tritonclient.grpc as grpc
from httpx_sse import EventSource
from locust import User, between, task

from triton_inputs import infer_input

# Locust's users are greenlets of one thread, which a waiting gRPC call would stop altogether.
gevent_grpc.init_gevent()

# It would say each request in a line of its own.
logging.getLogger("httpx").setLevel(logging.WARNING)

PROMPTS = ("def fibonacci(n):", "import os\n\n", "class Stack:\n", "for index in range(")
SAMPLING = {"max_tokens": 64, "temperature": 0.7, "ignore_eos": True}
TIMEOUT_S = 120.0


class CompletionUser(User):
    """Sends one completion after the other. Subclasses say how."""

    abstract = True
    wait_time = between(0.0, 0.1)

    @task
    def complete(self) -> None:
        """Stream one completion, and report its time to first token and its total time."""
        started = time.perf_counter()
        num_bytes, error, first_at = 0, None, None
        try:
            for text in self.stream(
                random.choice(PROMPTS), {**SAMPLING, "seed": random.getrandbits(32)}
            ):
                first_at = first_at or time.perf_counter()
                num_bytes += len(text.encode())
            if first_at is None:
                raise RuntimeError("the stream had no chunk")
            self._report("ttft", first_at - started, 0, None)
        except Exception as caught:
            error = caught
        self._report("total", time.perf_counter() - started, num_bytes, error)

    def stream(self, prompt: str, sampling: dict[str, object]):
        """Yield the texts of one completion."""
        raise NotImplementedError

    def _report(self, name: str, seconds: float, num_bytes: int, error: Exception | None) -> None:
        self.environment.events.request.fire(
            request_type=type(self).__name__,
            name=name,
            response_time=seconds * 1000,
            response_length=num_bytes,
            exception=error,
        )


class GrpcUser(CompletionUser):
    """Streams over gRPC with tritonclient; `--host` is host:port."""

    def on_start(self) -> None:
        """Open this user's one stream, which serves one request after the other."""
        self._client = grpc.InferenceServerClient(self.host)
        self._open_stream()

    def on_stop(self) -> None:
        """Close the stream."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def stream(self, prompt: str, sampling: dict[str, object]):
        """Yield the texts of one completion."""
        inputs = [
            infer_input("text_input", "BYTES", [prompt]),
            infer_input("stream", "BOOL", [True]),
            infer_input("sampling_parameters", "BYTES", [json.dumps(sampling)]),
        ]
        try:
            self._client.async_stream_infer("scheduler", inputs)
            while True:
                result, error = self._results.get(timeout=TIMEOUT_S)
                if error is not None:
                    raise error
                yield result.as_numpy("text_output")[0].decode()
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return
        except Exception:
            # The stream may be lost, or still bring the rest of this answer.
            self._client.stop_stream(cancel_requests=True)
            self._open_stream()
            raise

    def _open_stream(self) -> None:
        results: queue.Queue[tuple[object, object]] = queue.Queue()
        self._results = results
        self._client.start_stream(lambda result, error: results.put((result, error)))


class HttpUser(CompletionUser):
    """Streams over HTTP (server-sent events) with httpx; `--host` is a URL."""

    def on_start(self) -> None:
        """Open the connections."""
        self._client = httpx.Client(base_url=self.host, timeout=TIMEOUT_S)

    def on_stop(self) -> None:
        """Close them."""
        self._client.close()

    def stream(self, prompt: str, sampling: dict[str, object]):
        """Yield the texts of one completion."""
        body = {"text_input": prompt, "stream": True, **sampling}
        url = "/v2/models/scheduler/generate_stream"
        with self._client.stream("POST", url, json=body) as response:
            response.raise_for_status()
            for event in EventSource(response).iter_sse():
                outputs = json.loads(event.data)
                if "error" in outputs:
                    raise RuntimeError(outputs["error"])
                yield outputs["text_output"]
