"""Loads and unloads models of the Triton that this process belongs to, over its gRPC endpoint.

Owns these calls, each of which waits for its answer. Must not know which model is loaded or why.

`pb_utils.load_model` of 2.51.0 is not usable. It holds the GIL until the model is loaded, so no
other thread of its process runs meanwhile. If the load fails, the calling process may end, and
tritonserver with it. A gRPC call is that of any client: only its thread waits, and a load that
fails is an error.

    scheduler ── RepositoryModelLoad ──► tritonserver's gRPC ──► engine

A load may take long, so calls have no timeout.
"""

import re
from collections.abc import Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from charonia.local_calls import GRPC_OPTIONS
from charonia.server_options import ServerOptions

CONNECT_S = 10.0
"""Timeout for connecting: a starting server answers its models before it listens for clients."""
_OPTIONS = (
    *GRPC_OPTIONS,
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_FAILED_LOAD = re.compile(
    r"^load failed for model '.*?': version \d+ is at \w+ state: Internal: "
    r"(?:TritonModelException: )?"
)


class ControlError(Exception):
    """Triton refused a call, or cannot be reached."""


class GrpcControl:
    """Model control of a running server; connects at the first call.

    Args:
        options: how that server was started.

    Attributes:
        refusal: why it cannot load and unload models; None if it can.
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
            ControlError: it could not be loaded.
        """
        request = service_pb2.RepositoryModelLoadRequest(model_name=self._name(model))
        self._call(self._stub.RepositoryModelLoad, request)

    def unload(self, model: str) -> None:
        """Unload a model. It takes no more requests, but may still be finishing some.

        Raises:
            ControlError: Triton refused.
        """
        request = service_pb2.RepositoryModelUnloadRequest(model_name=self._name(model))
        self._call(self._stub.RepositoryModelUnload, request)

    def close(self) -> None:
        """Make a call in progress fail, and all later ones."""
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
        """Wait until the server listens; its answer does not matter."""
        request = service_pb2.ServerLiveRequest()
        try:
            self._stub.ServerLive(request, timeout=CONNECT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ControlError(f"nobody answers at {self._url}") from None


def _said_by_model(details: str) -> str:
    """The model's own error, without Triton's prefix."""
    return _FAILED_LOAD.sub("", details).rstrip("\n;")
