"""The server as an attacker on the same machine sees it.

Owns its addresses, and what an attack is. Must not know any attack.
"""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from charonia.launch.server.tritonserver import TritonServer
from support.e2e import array_of

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 120.0
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing is a reset


@dataclass(frozen=True)
class Target:
    """A server's addresses; it can be sent to another process.

    Attributes:
        repository: the models' folders, with the sockets in them.
    """

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    repository: Path

    @classmethod
    def of(cls, server: TritonServer) -> "Target":
        """Return the addresses of a server."""
        host = server.http_url.rpartition(":")[0]
        ports = server.http_port, server.grpc_port, server.metrics_port
        return cls(host, *ports, server.repository)

    @property
    def http_url(self) -> str:
        """`host:port`."""
        return f"{self.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """`host:port`."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def sockets(self) -> list[Path]:
        """The Unix sockets of the models."""
        return sorted(path for path in self.repository.rglob("*") if path.is_socket())

    def connect(self, port: int, *, receive_bytes: int | None = None) -> socket.socket:
        """A connection to one of its ports.

        Args:
            receive_bytes: the size of the buffer for what comes.
        """
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_TIMEOUT_S)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect((self.host, port))
        return connection

    @contextlib.contextmanager
    def stub(self) -> Iterator[Any]:
        """A gRPC connection of its own."""
        # Channels of one process share a connection unless they are told not to.
        options = [*_UNLIMITED, ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self.grpc_url, options) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@dataclass(frozen=True)
class Attack:
    """A hostile action, bounded in count and time.

    Attributes:
        run: takes the target and a strength, of which 1 takes a few seconds. It raises
            AssertionError where it gets an answer that it must not get, or none.
    """

    name: str
    run: Callable[[Target, int], None]


def infer_request(model: str, inputs: Mapping[str, Any], **options: Any) -> Any:
    """A request as gRPC has it.

    Args:
        inputs: values by name, see `array_of`; also wrong ones.
        options: `request_id`, `parameters`.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=options.get("request_id", ""))
    for name, value in (options.get("parameters") or {}).items():
        request.parameters[name].string_param = value
    for name, value in inputs.items():
        array = array_of(value)
        data_type = np_to_triton_dtype(array.dtype)
        request.inputs.add(name=name, datatype=data_type, shape=list(array.shape))
        is_text = data_type == "BYTES"
        request.raw_input_contents.append(
            serialize_byte_tensor(array).item() if is_text and array.size else array.tobytes()
        )
    return request


def reset(connection: socket.socket) -> None:
    """Close a connection as who pulls the plug."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()
