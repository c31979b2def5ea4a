"""The load test's users against a server that is late or loses streams."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from paths import LOADTESTS

USER = """
import sys

import locustfile
from locust.env import Environment

locustfile.TIMEOUT_S = 1.0
locustfile.GrpcUser.host = sys.argv[1]
user = locustfile.GrpcUser(Environment())
user.on_start()
for prompt in sys.argv[2:]:
    try:
        print(prompt, *user.stream(prompt, {}))
    except Exception as error:
        print(prompt, type(error).__name__)
user.on_stop()
"""


class Echo(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with the prompt: "late" after two seconds, "lost" with the end of the stream."""

    def ModelStreamInfer(self, requests, context):
        for request in requests:
            text = deserialize_bytes_tensor(request.raw_input_contents[0])[0]
            if text == b"lost":
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            if text == b"late":
                time.sleep(2)
            answer = service_pb2.ModelInferResponse(model_name="scheduler")
            answer.parameters["triton_final_response"].bool_param = True
            answer.outputs.add(name="text_output", datatype="BYTES", shape=[1])
            raw = serialize_byte_tensor(np.array([text], dtype=np.object_)).item()
            answer.raw_output_contents.append(raw)
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)


@pytest.fixture
def url() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_a_user_goes_on_with_a_new_stream_after_an_error(url: str) -> None:
    """An answer that comes too late is not that of the next request; a lost stream is replaced."""
    command = [sys.executable, "-c", USER, url, "a", "late", "b", "lost", "c"]
    run = subprocess.run(
        command, cwd=LOADTESTS, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout.splitlines() == [
        "a a",
        "late Empty",
        "b b",
        "lost InferenceServerException",
        "c c",
    ], run.stderr
