"""Streams that a test can watch, leave or break while they run, each read by a thread of its own.

Owns the connections: one per stream, gRPC by tritonclient's stub and HTTP by the standard library,
so that one can be cut at any moment, also while nothing comes. A unary call is a stream with one
response. Must not know what the server does.
"""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal

import grpc
import numpy as np
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

Outputs = dict[str, Any]
Protocol = Literal["grpc", "http", "unary"]
_OUTPUT_FLAGS = ("return_token_ids", "return_finish_reason", "return_timing")
_CLIENT_TIMEOUT_S = 240.0  # so that a test fails rather than hangs, also on a slow machine
_WAIT_TURN_S = 0.002
_IS_FINAL = "triton_final_response"  # over gRPC alone
_ERROR = "error"
WRONG_ANSWER = "wrong answer: "


class LiveStream:
    """One request under way; it is sent when this is made.

    Args:
        url: `host:port` of the protocol; of gRPC for "unary".
        timeout: seconds after which the client gives up (over HTTP, without a response).
        sampling: sampling parameters.

    Attributes:
        token_ids: so far.
        error: why it ended, unless by its last token or by `leave`. It begins with `WRONG_ANSWER`
            where a response came after the last one or after an error, or without the FINAL flag
            that it should have.
        num_after_error: responses that came after the error, but for an empty last one.
        finish_reason, timing: of the last response.
        num_empty: responses without a token.
        arrivals: when each response came (`time.monotonic`), and the tokens so far.
        ended_at: when nothing came any more, or None.
    """

    def __init__(
        self,
        url: str,
        prompt_ids: Sequence[int],
        *,
        protocol: Protocol = "grpc",
        model: str = "scheduler",
        request_id: str = "",
        timeout: float = _CLIENT_TIMEOUT_S,
        **sampling: Any,
    ) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.num_empty = 0
        self.num_after_error = 0
        self.arrivals: list[tuple[float, int]] = []
        self.ended_at: float | None = None
        self.error: str | None = None
        self.finish_reason: str | None = None
        self.timing: dict[str, float] = {}
        self._has_left = False
        self._connection = _CONNECTIONS[protocol](
            url, model, request_id, list(prompt_ids), json.dumps(sampling), timeout
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True if no more responses come."""
        return self.ended_at is not None

    @property
    def longest_pause_s(self) -> float:
        """Longest time between two responses, in seconds."""
        times = [came_at for came_at, _ in self.arrivals]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def wait_tokens(self, num_tokens: int, timeout: float = 120.0) -> None:
        """Wait until so many tokens came, or the stream ended."""
        deadline = time.monotonic() + timeout
        while len(self.token_ids) < num_tokens and not self.is_over:
            assert time.monotonic() < deadline, f"{len(self.token_ids)} tokens in {timeout:g} s"
            time.sleep(_WAIT_TURN_S)

    def leave(self) -> None:
        """Go away: cancel the gRPC call, or break the HTTP connection."""
        self._has_left = True
        self._connection.cut()

    def wait_over(self, timeout: float = _CLIENT_TIMEOUT_S) -> "LiveStream":
        """Wait for the end."""
        self._thread.join(timeout)
        assert self.is_over, f"the stream hangs after {len(self.token_ids)} tokens"
        return self

    def _run(self) -> None:
        try:
            for outputs in self._connection.responses():
                self._take(outputs)
            if self.finish_reason is None and self.error is None:
                self.error = "the stream ended before its last response"
        except _ServerError as error:
            self.error = self.error or str(error)
        except _WrongAnswerError as error:
            self.error = str(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = self.error or f"the connection broke: {error!r}"
        finally:
            self._connection.close()
            if self.num_after_error:
                num = self.num_after_error
                self.error = f"{WRONG_ANSWER}{num} responses after the error: {self.error}"
            if self._has_left:
                self.error = None
            self.ended_at = time.monotonic()

    def _take(self, outputs: Outputs) -> None:
        if self.finish_reason is not None:
            raise _WrongAnswerError(f"{WRONG_ANSWER}a response after the last one: {outputs}")
        ids = outputs.get("output_ids", [])
        is_last = outputs.get("finish_reason", "None") != "None"
        if self.error is not None:
            self.num_after_error += bool(ids or is_last or _ERROR in outputs)
            return
        if _ERROR in outputs:
            self.error = outputs[_ERROR]
            return
        self.num_empty += not ids
        self.token_ids += ids
        self.arrivals.append((time.monotonic(), len(self.token_ids)))
        if outputs.get(_IS_FINAL, is_last) != is_last:
            raise _WrongAnswerError(f"{WRONG_ANSWER}the FINAL flag is wrong: {outputs}")
        if is_last:
            self.finish_reason = outputs["finish_reason"]
            self.timing = json.loads(outputs["timing"])


class _WrongAnswerError(Exception):
    """A wrong sequence of responses; the text says what is wrong."""


class _ServerError(Exception):
    """An error of the server in the stream's place, or at its end."""


class _GrpcConnection:
    def __init__(
        self,
        url: str,
        model: str,
        request_id: str,
        prompt_ids: list[int],
        sampling: str,
        timeout: float,
    ) -> None:
        self._channel = grpc.insecure_channel(url, options=[("grpc.use_local_subchannel_pool", 1)])
        request = _infer_request(model, request_id, prompt_ids, sampling)
        _add_input(request, "stream", "BOOL", np.array([True]))
        # Triton would keep an empty last response to itself.
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        # Without the header `triton_grpc_error`, which would tell an error's code: server 2.51.0
        # can crash when such a stream ends.
        self._call = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer(
            iter([request]), timeout=timeout
        )

    def responses(self) -> Iterator[Outputs]:
        try:
            for response in self._call:
                if response.error_message:
                    yield {_ERROR: response.error_message}
                    continue
                is_final = response.infer_response.parameters[_IS_FINAL].bool_param
                yield _values(InferResult(response.infer_response)) | {_IS_FINAL: is_final}
        except grpc.RpcError as error:
            raise _ServerError(error.details() or str(error.code())) from None

    def cut(self) -> None:
        self._call.cancel()

    def close(self) -> None:
        self._channel.close()


class _UnaryConnection:
    def __init__(
        self,
        url: str,
        model: str,
        request_id: str,
        prompt_ids: list[int],
        sampling: str,
        timeout: float,
    ) -> None:
        self._channel = grpc.insecure_channel(url, options=[("grpc.use_local_subchannel_pool", 1)])
        self._request = _infer_request(model, request_id, prompt_ids, sampling)
        self._timeout = timeout

    def responses(self) -> Iterator[Outputs]:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        try:
            yield _values(InferResult(stub.ModelInfer(self._request, timeout=self._timeout)))
        except grpc.RpcError as error:
            raise _ServerError(error.details() or str(error.code())) from None

    def cut(self) -> None:
        self._channel.close()

    def close(self) -> None:
        self._channel.close()


class _HttpConnection:
    def __init__(
        self,
        url: str,
        model: str,
        request_id: str,
        prompt_ids: list[int],
        sampling: str,
        timeout: float,
    ) -> None:
        body: dict[str, Any] = {"id": request_id, "input_ids": prompt_ids}
        body |= {"sampling_parameters": sampling}
        body |= dict.fromkeys(("stream", *_OUTPUT_FLAGS), True)
        self._connection = http.client.HTTPConnection(url, timeout=timeout)
        self._connection.connect()
        self._socket = self._connection.sock  # http.client lets go of it too early for `cut`
        path = f"/v2/models/{model}/generate_stream"
        self._connection.request("POST", path, json.dumps(body))

    def responses(self) -> Iterator[Outputs]:
        reply = self._connection.getresponse()
        if reply.status != 200:
            raise _ServerError(json.loads(reply.read().removeprefix(b"data: "))["error"])
        for line in reply:
            _, is_data, event = line.partition(b"data: ")
            if not is_data:
                continue
            outputs: Outputs = json.loads(event)
            ids = outputs.get("output_ids", [])  # one element is not written as a list
            yield outputs | {"output_ids": ids if isinstance(ids, list) else [ids]}

    def cut(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        self._socket.close()


_CONNECTIONS = {"grpc": _GrpcConnection, "unary": _UnaryConnection, "http": _HttpConnection}


def _infer_request(model: str, request_id: str, prompt_ids: list[int], sampling: str) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    _add_input(request, "input_ids", "INT32", np.array(prompt_ids, dtype=np.int32))
    text = serialize_byte_tensor(np.array([sampling.encode()], dtype=np.object_))
    request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(text.item())
    for name in _OUTPUT_FLAGS:
        _add_input(request, name, "BOOL", np.array([True]))
    return request


def _add_input(request: Any, name: str, datatype: str, values: Any) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=list(values.shape))
    request.raw_input_contents.append(values.tobytes())


def _values(result: InferResult) -> Outputs:
    outputs: Outputs = {}
    for output in result.get_response().outputs:
        values = result.as_numpy(output.name).tolist()
        if output.name == "output_ids":
            outputs[output.name] = values
        elif values:
            value = values[0]
            outputs[output.name] = value.decode() if isinstance(value, bytes) else value
    return outputs
