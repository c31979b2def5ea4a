"""Triton's model control, for one running server: the state of models, and reloading them.

Owns these calls, which block. Must not know when a model counts as lost.

All calls use gRPC: a load over HTTP disturbs streams of other connections, and clients can keep
HTTP's few threads busy.
"""

import threading
import time

import psutil
from tritonclient.utils import InferenceServerException

from charonia.errors import LaunchError
from charonia.local_calls import grpc_client
from charonia.supervision.process_table import is_stopped
from charonia.supervision.server.protocols import RunningServer

_ANSWER_S = 2.0
_LEAST_S = 0.001  # a call without a timeout could wait for ever


class ModelControl:
    """Model control of one server, which must be running.

    Args:
        stop: once set, no model is loaded or unloaded: another server may have taken its place.
    """

    def __init__(self, server: RunningServer, stop: threading.Event) -> None:
        self._server = server
        self._stop = stop

    def is_loaded(self, model: str) -> bool | None:
        """Return whether a model is loaded now; None if tritonserver does not answer."""
        with grpc_client(self._server.grpc_url) as client:
            try:
                return bool(client.is_model_ready(model, client_timeout=_ANSWER_S))
            except InferenceServerException:
                return None

    def is_served(self, model: str) -> bool:
        """Return whether Triton should serve a model: it is neither unloaded nor being loaded."""
        return self._state(model) in ("READY", None)

    def is_load_orphaned(self, model: str) -> bool:
        """Return whether tritonserver is loading a Python model that has no running process.

        This is briefly true in every load. But if the process is killed while it starts,
        tritonserver 2.51.0 may wait for it for ever, and so does the client that requested the
        load.
        """
        return self._state(model) == "LOADING" and all(
            is_stopped(process.pid) for process in self._processes(model)
        )

    def reload(self, model: str, *, timeout_s: float) -> list[psutil.Process]:
        """Unload a model and load it again.

        Its live processes finish their requests and end.

        Returns:
            Its new processes.

        Raises:
            LaunchError: it could not be loaded within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        before = self._processes(model)
        with grpc_client(self._server.grpc_url) as client:
            for call in (client.unload_model, client.load_model):
                if self._stop.is_set():
                    raise LaunchError(f"{model} is not loaded again: tritonserver ends")
                left_s = max(deadline - time.monotonic(), _LEAST_S)
                try:
                    call(
                        self._server.control_name(model),
                        headers=self._server.api_headers,
                        client_timeout=left_s,
                    )
                except InferenceServerException as error:
                    raise LaunchError(
                        f"{model} could not be loaded again: {error.message()}"
                    ) from None
        return [one for one in self._processes(model) if one not in before]

    def _state(self, model: str) -> str | None:
        """The state in tritonserver's index; None if unknown, or without an answer."""
        return self._server.model_states(_ANSWER_S).get(model)

    def _processes(self, model: str) -> list[psutil.Process]:
        return self._server.stubs().get(model, [])
