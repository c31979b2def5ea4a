"""Requests that the embedded server does not survive by itself: it must, beside a stream."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from charonia.launch.server.guard import MAX_ELEMENTS
from charonia.launch.server.tritonserver import TritonServer
from support.bystander import Bystander
from support.e2e import HTTP, generate, infer_grpc, request_inputs

OVERFLOWING = 2**62  # that many INT32 have 0 bytes, modulo 2^64
TOO_MANY = f"too many elements; at most {MAX_ELEMENTS} are accepted"
PUBLIC = ("generate", "scheduler", "llm", "tokenizer")


@pytest.fixture(autouse=True)
def bystander(server: TritonServer) -> Iterator[None]:
    """A stream of the same server, whose processes must all live on."""
    pids = {model: server.pids(model) for model in (*PUBLIC, "engine", "postprocessor")}
    pid = server.pid
    with Bystander(server, seed=7) as stream:
        yield
        stream.wait_tokens(3)
    assert stream.token_ids == stream.undisturbed()
    assert server.pid == pid
    assert server.is_running
    assert pids == {model: server.pids(model) for model in pids}


def ids_request(model: str, num_elements: int, content: bytes) -> Any:
    """A request whose `input_ids` say to be so many, and are these bytes."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="input_ids", datatype="INT32", shape=[num_elements])
    request.raw_input_contents.append(content)
    return request


def stream_error(server: TritonServer, request: Any) -> str:
    """The error that a gRPC stream gives to a request."""
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (answer,) = stub.ModelStreamInfer(iter([request]), timeout=30)
    return str(answer.error_message)


@pytest.mark.parametrize("model", PUBLIC)
@pytest.mark.parametrize(
    ("num_elements", "content"), [(OVERFLOWING, b""), (OVERFLOWING + 1, b"\1\0\0\0")]
)
def test_a_shape_whose_size_overflows_is_refused(
    server: TritonServer, model: str, num_elements: int, content: bytes
) -> None:
    assert TOO_MANY in stream_error(server, ids_request(model, num_elements, content))


@pytest.mark.parametrize("num_elements", [MAX_ELEMENTS + 1, 2**33, 2**40, 2**62, 2**63 - 1])
def test_values_in_json_need_the_memory_of_those_that_came(
    server: TritonServer, num_elements: int
) -> None:
    tensor = {"name": "input_ids", "shape": [num_elements], "datatype": "INT32", "data": [1]}
    url = f"http://{server.http_url}/v2/models/generate/infer"
    reply = HTTP.post(url, json={"inputs": [tensor]})
    assert (reply.status_code, TOO_MANY in reply.text) == (400, True)


def test_the_classification_of_text_is_refused(server: TritonServer) -> None:
    request = service_pb2.ModelInferRequest(model_name="scheduler")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\1\0\0\0a")
    output = request.outputs.add(name="text_output")
    output.parameters["classification"].int64_param = 1
    assert "unsupported type 'BYTES'" in stream_error(server, request)


def test_what_is_no_attack_passes(server: TritonServer) -> None:
    assert generate(server, {"text_input": "a", "max_tokens": 2}).status_code == 200
    assert infer_grpc(server, request_inputs([1, 2, 3], {"max_tokens": 2})).text
    url = f"http://{server.http_url}/v2/models/generate/infer"
    tensor = {"name": "input_ids", "shape": [3], "datatype": "INT32", "data": [1, 2, 3]}
    with closing(HTTP.post(url, json={"inputs": [tensor]})) as reply:
        assert reply.status_code == 200
