"""Loading and unloading models of the Triton that this process belongs to, over its own gRPC.

Owns these calls, each of which waits for its answer. Must not know which model is loaded, or why.

`pb_utils.load_model` is no way to do so (2.51.0). It holds Python's lock until the model is loaded,
so that no other thread of its process runs meanwhile; and where the load fails, the process that
made the call may end, and tritonserver with it. A call over gRPC is one of a client: nobody but its
thread waits, and a load that fails is an error.

    scheduler ── RepositoryModelLoad ──► tritonserver's gRPC ──► engine

A load takes as long as it takes, so no time limit ends the wait for an answer.
"""

import re
from collections.abc import Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from charonia.supervision.models.server_options import ServerOptions

CONNECT_S = 10.0
"""That the server may take until it listens: it answers models before it answers clients."""
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # the server is on this machine
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_FAILED_LOAD = re.compile(
    r"^load failed for model '.*?': version \d+ is at \w+ state: Internal: "
    r"(?:TritonModelException: )?"
)


class ControlError(Exception):
    """Triton refuses, or cannot be reached."""


class GrpcControl:
    """Model control of a running server; it connects with the first call.

    Args:
        options: how that server was started.

    Attributes:
        refusal: why it carries nothing out; None where it does.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.refusal = options.refusal
        self._url = options.grpc_url
        self._metadata = options.metadata
        self._name = options.control_name
        self._channel = grpc.insecure_channel(self._url, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def load(self, model: str) -> None:
        """Load a model, and wait until it is there.

        Raises:
            ControlError: it is not.
        """
        request = service_pb2.RepositoryModelLoadRequest(model_name=self._name(model))
        self._call(self._stub.RepositoryModelLoad, request)

    def unload(self, model: str) -> None:
        """Unload a model; it takes no more requests then, but may still be at the last ones.

        Raises:
            ControlError: Triton refuses.
        """
        request = service_pb2.RepositoryModelUnloadRequest(model_name=self._name(model))
        self._call(self._stub.RepositoryModelUnload, request)

    def close(self) -> None:
        """End the call under way, if there is one, with an error; and take no more."""
        self._channel.close()

    def _call(self, method: Callable[..., Any], request: Any) -> None:
        try:
            self._connect()
            method(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise ControlError(_said_by_model(error.details())) from None
        except ValueError as error:  # the channel was closed meanwhile
            raise ControlError(str(error)) from None

    def _connect(self) -> None:
        """Wait until the server listens; what it answers does not matter."""
        request = service_pb2.ServerLiveRequest()
        try:
            self._stub.ServerLive(request, timeout=CONNECT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ControlError(f"nobody answers at {self._url}") from None


def _said_by_model(details: str) -> str:
    """Why a load has failed, without Triton's words around what the model itself has raised."""
    return _FAILED_LOAD.sub("", details).rstrip("\n;")
